"""The methods that the examples write: an evicting one in a dozen lines, a selecting one in sixty.

Stops: an example that no longer runs, that is not full attention where its budget covers
everything, that reads as much as full attention where it does not, or that does not survive
truncate and fork.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from engine.methods.exact import Exact
from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.methods.select.quest import Quest
from examples.own_evicting import KNorm
from examples.own_selecting import BlockMean
from tests.builders import random_ids, tiny_config, tiny_llm
from tests.engine.methods.method_checks import allocated, llm_of

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
WHOLE = [KNorm(tokens=512), BlockMean(tokens=512)]
SPARSE = [KNorm(share=0.2), KNorm(tokens=40), BlockMean(tokens=64), BlockMean(share=0.2, block=8)]


def played(session, prompt=300, answer=5, seed=0):
    """Logits of a prompt's last token and of the answer's."""
    ids = random_ids(prompt + answer, seed=seed)
    return torch.stack([session.prefill(ids[:prompt]), *map(session.decode, ids[prompt:])])


@pytest.mark.parametrize("method", WHOLE, ids=repr)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_budget_that_covers_everything_is_full_attention(method, backend):
    llm = llm_of(backend=backend)
    with llm.session(method) as session, llm.session(Full()) as full:
        for seed in (0, 1):
            got, expected = played(session, 150, seed=seed), played(full, 150, seed=seed)
            torch.testing.assert_close(got, expected, atol=5e-5, rtol=5e-5)


@pytest.mark.parametrize("method", SPARSE, ids=repr)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_smaller_budget_reads_less(method, backend):
    llm = llm_of(backend=backend)
    with llm.session(method) as session, llm.session(Full()) as full:
        got, expected = played(session), played(full)
        assert not torch.allclose(got[1:], expected[1:], atol=1e-4)
        rows, plan = session.runtime.rows_read(len(session)), session.plan
        assert session.stats.sparse_steps == 5
        for layer in plan.partial_layers:
            assert rows[layer] < 0.4 * len(session)
        if plan.sparse_layers:
            assert all(len(chosen) < 200 for chosen in session.selections.values())


@pytest.mark.parametrize("method", SPARSE, ids=repr)
def test_going_back_and_copies_change_nothing(method):
    llm, ids = llm_of(), random_ids(40, seed=5)
    with llm.session(method) as session, llm.session(method) as fresh:
        first, again = played(session), played(fresh)
        assert torch.equal(first, again)
        with session.fork() as twin:
            for token in ids[:3]:
                assert torch.equal(session.decode(token), twin.decode(token))
        session.truncate(300)
        assert torch.equal(torch.stack([*map(session.decode, random_ids(305)[300:])]), first[1:])
        # a second turn, and back into it
        expected = [fresh.prefill(ids), fresh.decode(7)]
        for _ in range(2):
            got = [session.prefill(ids), session.decode(7)]
            assert all(map(torch.equal, got, expected))
            session.truncate(305)


@pytest.mark.parametrize("method", SPARSE, ids=repr)
def test_declared_bytes_are_allocated(method):
    llm = llm_of()
    plan = llm.plan(method)
    with llm.session(method) as session:
        played(session)
        runtime, others = session.runtime, ("setup", "method", "plan", "bank")
        held = {name: part for name, part in vars(runtime).items() if name not in others}
        declared = runtime.nbytes
        assert 0 <= allocated(held) - declared <= 1024
        # a store's rows take the place of those that waited for it
        store = session.runtime.needs.history == "store"
        names = ("retained rows", "context bank") if store else ("selection",)
        assert declared <= sum(map(plan.bytes_of, names))


def test_the_examples_are_short():
    """Lines that are neither blank, comment nor docstring."""
    for name, most in (("own_evicting.py", 15), ("own_selecting.py", 60)):
        source = (EXAMPLES / name).read_text()
        lines = source.splitlines()[ast.parse(source).body[0].end_lineno :]
        code = [line for line in lines if line.strip() and not line.strip().startswith("#")]
        assert len(code) <= most, (name, len(code))


@dataclass(frozen=True)
class Mine(OmniKV):
    """A method of one's own that derives from one of the engine's."""

    named = False


@dataclass(frozen=True)
class Pages(Quest):
    """Another."""

    named = False


@pytest.mark.parametrize(
    "method, same",
    [
        (Mine(filter_layers=(1,), tokens=20, dense_below=0), OmniKV),
        (Pages(tokens=80, page=8, dense_layers=2), Quest),
    ],
    ids=["omnikv", "quest"],
)
def test_a_method_that_derives_from_another_knows_what_that_knows(method, same):
    """Sliding windows and the cap on attention scores, here of a Gemma."""
    config = tiny_config(
        4, architectures=["Gemma2ForCausalLM"], sliding_window=70, hidden_activation=None
    )
    assert config.local_layers and config.block.score_cap
    llm = tiny_llm(Full(), config, backend="reference", max_context=512)
    plain = same(**{name: getattr(method, name) for name in method.__dataclass_fields__})
    with llm.session(method) as session, llm.session(plain) as other:
        assert torch.equal(played(session), played(other))
    assert llm.resolve_method(Exact(method))[0].method == method
    with llm.session(KNorm(tokens=40)) as session:
        ids = played(session)
        assert torch.isfinite(ids).all()
        read = session.runtime.rows_read(len(session))
        local = config.local_layers
        assert all((rows == 70) if i in local else rows < 70 for i, rows in enumerate(read))
