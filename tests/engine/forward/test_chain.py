"""Layers of a step that run in one call of C++ give the bits of calls from Python, and which do.

Stops: a layer that reads another's rows, rows that moved or were cut, a choice of the step before,
a layer that does more than its call, a step that broke off and left something behind.
"""

from functools import partial

import pytest
import torch

from engine import LLM, Full, OmniKV
from engine.forward.chain.layers import LayerChain
from engine.methods.exact import Exact
from engine.methods.mass_meter import MassMeter
from engine.methods.omnikv import OmniKVRuntime
from engine.model.tensors import random_stream
from kernels.chain.layers import Chain
from kernels.native.library import missing
from tests.builders import SESSION_SETTINGS, hybrid_config, random_ids, session_config, tiny_llm
from tests.engine.forward.test_native_step import (
    GEMMA2,
    GEMMA3,
    GRANITE,
    MISTRAL,
    MIXTURE,
    OLMO2,
    PHI3,
    QWEN2,
    QWEN3,
)

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
SPARSE = OmniKV(filter_layers=(1, 4), tokens=24, tail=64, dense_below=0)
RAW = OmniKV(filter_layers=(0, 3), tokens=1, tail=64, dense_below=0, scores="raw")
WINDOW = OmniKV(filter_layers=(1, 4), tokens=24, tail=64, dense_below=0, selector="uniform")
LATER = OmniKV(filter_layers=(1, 6), tokens=24, tail=64, dense_below=0, selector="exponential")
LAYERS = session_config().num_layers
ALL = {0: LAYERS}
WIDER_HEADS = {"head_dim": 32}
WIDER = {"hidden_size": 64, "intermediate_size": 128}  # whole groups of weights in few bits
# method, fields of the model, settings, runs {first layer: behind the last}
CASES = {
    "full": (Full(), {}, {}, ALL),
    "chosen": (SPARSE, {}, {}, ALL),
    "chosen, bfloat16": (SPARSE, {}, {"dtype": "bfloat16"}, ALL),
    "raw scores, one token, float16": (RAW, {}, {"dtype": "float16"}, ALL),
    "filter layers alone": (WINDOW, {}, {}, {0: 1, 2: 4, 5: LAYERS}),
    "another window": (LATER, {}, {}, {0: 1, 2: 6, 7: LAYERS}),
    "biases, a tied head": (SPARSE, QWEN2, {}, ALL),
    "norms of heads": (SPARSE, QWEN3, {}, ALL),
    "a part rotates": (SPARSE, PHI3, {}, ALL),
    "windows": (Full(), MISTRAL, {}, ALL),
    "int8 weights": (SPARSE, WIDER, {"weights": "int8"}, ALL),
    "int8 weights, biases, bfloat16": (
        SPARSE,
        {**WIDER, **QWEN2},
        {"weights": "int8", "dtype": "bfloat16"},
        ALL,
    ),
    "int4 weights": (RAW, {**WIDER, **QWEN3}, {"weights": "int4", "dtype": "bfloat16"}, ALL),
    "int4 weights, windows": (Full(), {**WIDER, **MISTRAL}, {"weights": "int4"}, ALL),
    "int8 rows": (SPARSE, WIDER_HEADS, {"bank": "int8", "dtype": "bfloat16"}, ALL),
    "int4 rows, norms of heads": (RAW, {**WIDER_HEADS, **QWEN3}, {"bank": "int4"}, ALL),
    "fp8 rows": (Full(), WIDER_HEADS, {"bank": "fp8", "dtype": "float16"}, ALL),
    "int8 rows, windows": (Full(), {**WIDER_HEADS, **MISTRAL}, {"bank": "int8"}, ALL),
    "factors": (SPARSE, GRANITE, {"dtype": "bfloat16"}, ALL),
    "norms on both sides, GELU, caps": (Full(), GEMMA2, {"dtype": "bfloat16"}, ALL),
    "norms of heads that add one": (Full(), GEMMA3, {"dtype": "float16"}, ALL),
    "norms on both sides, int8 rows": (Full(), {**WIDER_HEADS, **GEMMA3}, {"bank": "int8"}, ALL),
    "norms after, of all heads": (SPARSE, OLMO2, {}, ALL),
    "norms after, of all heads, int8": (
        SPARSE,
        {**WIDER, **OLMO2},
        {"weights": "int8", "bank": "int8", "dtype": "bfloat16"},
        ALL,
    ),
    "experts": (SPARSE, MIXTURE, {"dtype": "bfloat16"}, ALL),
    "experts in int8": (SPARSE, {**WIDER, **MIXTURE}, {"weights": "int8"}, ALL),
    "experts in int4": (
        SPARSE,
        {**WIDER, **MIXTURE, "moe_intermediate_size": 64},
        {"weights": "int4", "dtype": "bfloat16"},
        ALL,
    ),
    "int8 weights of 48 columns": (SPARSE, {}, {"weights": "int8"}, {}),
    # more than such a call does
    "int8 rows of half a vector": (SPARSE, {"head_dim": 24}, {"bank": "int8"}, {}),
    "rows in host memory": (SPARSE, {}, {"offload": "host"}, {}),
    "the reference": (SPARSE, {}, {"backend": "reference"}, {}),
    "torch's operators": (SPARSE, {}, {"backend": "cpu"}, {}),
}


@pytest.fixture
def runs(monkeypatch):
    """The runs of each step: {first layer: behind the last}. `apart`: nothing runs so."""
    found, ready = [], LayerChain.ready

    def noted(chain, step):
        if noted.apart:
            return False
        possible = ready(chain, step)
        found.append(dict(chain._ends) if possible else {})
        return possible

    noted.apart = False
    monkeypatch.setattr(LayerChain, "ready", noted)
    return found, noted


def state(session):
    """What a step leaves: selections, scores, the rows and queries of all layers."""
    n, bank, ring = len(session.ids), session.bank, session.query_ring
    rows = [side[:, :, :n].clone() for layer in range(LAYERS) for side in bank.kv(layer)]
    chosen = [t for _, t in sorted(session.selections.items())]
    return [*chosen, *rows, ring.newest()]


def told(session, lengths=()):
    """Logits of steps; before each of the latter ones the session is cut to a length."""
    found = [session.decode(token).clone() for token in (7, 3, 60)]
    for n in lengths:
        session.truncate(n)
        found.append(session.decode(5).clone())
    return found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("count", [1, 131])
def test_a_step_has_the_bits_of_calls_from_python(case, count, runs):
    """Of the first token on, and past a block that leaves the tail."""
    method, fields, settings, expected = CASES[case]
    found, way = runs
    stream = partial(random_stream, seed=0, sharpness=2.5)
    settings = {"device": "cpu", **SESSION_SETTINGS, **settings}
    llm = LLM.from_stream(session_config(**fields), stream, method=method, **settings)
    results = []
    for way.apart in (False, True):
        session = llm.session()
        session.prefill(random_ids(count))
        lengths = () if count == 1 or method is not SPARSE else (count, 100, 64, 1)
        results.append(told(session, lengths))
        assert bool(session.stats.sparse_steps) is (method.name == "omnikv")
        session.close()
    assert found and all(one == expected for one in found)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("method", [Full(), SPARSE, WINDOW])
def test_a_step_leaves_what_calls_from_python_leave(method, runs):
    _, way = runs
    llm, results = tiny_llm(method), []
    for way.apart in (False, True):
        session = llm.session()
        session.prefill(random_ids(200))
        told(session)
        results.append(state(session))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("left", [(7,), (0,), (3, 4), (0, 2, 4, 6), (1, 3, 5, 7), range(1, 8)])
def test_any_layer_may_be_left_to_python(left, runs, monkeypatch):
    """The last one too: then logits are made from Python."""
    found, way = runs
    chained = OmniKVRuntime.chained
    monkeypatch.setattr(
        OmniKVRuntime, "chained", lambda own, i: None if i in left else chained(own, i)
    )
    llm, results = tiny_llm(SPARSE), []
    for way.apart in (False, True):
        session = llm.session()
        session.prefill(random_ids(140))
        results.append([*told(session), *state(session)])
    ran = {layer for first, stop in found[0].items() for layer in range(first, stop)}
    assert ran == set(range(LAYERS)) - set(left)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_threads_do_not_change_bits(runs):
    llm, results, before = tiny_llm(SPARSE), [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            session = llm.session()
            session.prefill(random_ids(150))
            results.append([*told(session), *state(session)])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_rows_that_move_are_read_where_they_lie(runs):
    """Methods, forks and rows elsewhere: every step reads what the session has now."""
    found, way = runs
    llm, results = tiny_llm(Full()), []
    for way.apart in (False, True):
        session = llm.session()
        session.prefill(random_ids(140))
        logits = [session.decode(7)]
        twin = session.fork()
        for method in (SPARSE, Full(), RAW):
            twin.set_method(method)
            logits.append(twin.decode(9))
        bank = twin.bank
        for layer, held in enumerate(bank._layers):
            bank._layers[layer] = held._replace(k=held.k.clone(), v=held.v.clone())
            held.k.fill_(float("nan"))
        bank.moves += 1
        logits += [twin.decode(1), session.decode(11), twin.decode(2)]
        results.append([t.clone() for t in logits])
    assert found and all(one == ALL for one in found)
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_step_that_broke_off_leaves_nothing(runs, monkeypatch):
    """As Ctrl-C behind the call: the session is where it was, and goes on as if nothing was."""
    llm = tiny_llm(SPARSE)
    session, run = llm.session(), Chain.__call__
    session.prefill(random_ids(140))
    session.decode(7)
    expected = session.fork().decode(9).clone()

    def broken(chain, *given):
        run(chain, *given)
        raise KeyboardInterrupt

    monkeypatch.setattr(Chain, "__call__", broken)
    with pytest.raises(KeyboardInterrupt):
        session.decode(60)
    monkeypatch.setattr(Chain, "__call__", run)
    assert len(session.ids) == 141
    assert torch.equal(session.decode(9), expected)


def test_sessions_that_share_a_step_are_called_from_python(runs):
    """And have the bits of a step alone."""
    found, _ = runs
    llm = tiny_llm(SPARSE)
    alone = []
    for seed in (0, 1):
        session = llm.session()
        session.prefill(random_ids(140, seed=seed))
        alone.append(session.decode(7).clone())
    assert found == [ALL, ALL]
    batch = llm.batch(slots=2)
    sessions = [batch.session() for _ in range(2)]
    for seed, session in enumerate(sessions):
        session.prefill(random_ids(140, seed=seed))
    found.clear()
    for session in sessions:
        batch.feed(session, 7)
    together = batch.step()
    assert not found
    for session, expected in zip(sessions, alone):
        torch.testing.assert_close(together[session], expected, rtol=2e-4, atol=2e-4)


def test_a_meter_and_drafts_are_told_of_every_layer(runs):
    """Whoever stands around a runtime sees each layer, and gets what it measures."""
    found, _ = runs
    llm = tiny_llm(Exact(SPARSE))
    session = llm.session()
    session.prefill(random_ids(140))
    chain = LayerChain(
        session.runner.model,
        session.runner.halves,
        MassMeter(session.runtime),
        session.query_ring,
    )
    assert not chain._able
    session.close()


def test_a_recurrent_layer_ends_a_run(runs):
    found, way = runs
    llm, results = tiny_llm(Full(), hybrid_config()), []
    for way.apart in (False, True):
        session = llm.session()
        session.prefill(random_ids(90))
        results.append(told(session))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_more_tokens_than_a_chain_has_room_for_are_refused(runs):
    llm = tiny_llm(Full())
    session = llm.session()
    session.prefill(random_ids(20))
    session.decode(7)
    chain = session.runner._dense_step._decoder._chain._chain
    with pytest.raises(ValueError, match="expected up to"):
        chain(torch.zeros(1, 1, chain.hidden), 0, 1, (chain.most + 1, 0, 0, None, ()))
