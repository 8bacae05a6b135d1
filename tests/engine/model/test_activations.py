"""`activations="int8"`: a prompt's products with weights of few bits take rows of 8 bits where a
user asks for that, and nothing else changes.

Stops: a default that rounds, an option that is taken and dropped, rows of it that pass for others.
"""

from dataclasses import replace

import pytest
import torch

from engine import LLM
from engine.base.errors import SavedFileError, SettingError
from engine.model.share.divide import share_of
from engine.model.tensors import random_stream
from engine.ranks.weights.few_bits import require_whole_steps
from engine.saved.model_key import model_key
from kernels.launch.softmax import Softmax
from kernels.prefill.native import rounds_queries
from tests.builders import tiny_config

LONG, SHORT = list(range(3, 90)), list(range(3, 30))  # a prompt is rounded from 32 rows on


def model(weights="int8", activations="auto", **settings):
    config = tiny_config(layers=2, hidden=64, head_dim=16)
    stream = lambda *args: random_stream(*args, seed=5)  # noqa: E731
    settings = dict(device="cpu", max_context=256) | settings
    return LLM.from_stream(config, stream, weights=weights, activations=activations, **settings)


def logits(llm, ids):
    with llm.session() as session:
        return session.prefill(ids).flatten().clone()


def apart(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("word", ["int8", "int4"])
def test_a_prompt_is_rounded_and_few_rows_are_not(word):
    usual, rounded = model(word), model(word, "int8")
    assert not usual.model.layers[0].qkv.rounds and rounded.model.layers[0].qkv.rounds
    assert not rounded.model.lm_head.rounds
    assert torch.equal(logits(usual, SHORT), logits(rounded, SHORT))
    assert 1e-4 < apart(logits(rounded, LONG), logits(usual, LONG)) < 0.03
    row = torch.randn(1, 64).to(usual.dtype)
    assert torch.equal(usual.model.layers[1].o(row), rounded.model.layers[1].o(row))


@pytest.mark.parametrize("word", ["int8", "int4"])
def test_every_backend_rounds_the_same_rows(word):
    usual, found = logits(model(word), LONG), logits(model(word, "int8"), LONG)
    for backend in ("reference", "cpu"):
        other = logits(model(word, "int8", backend=backend), LONG)
        assert apart(other, found) < apart(found, usual) / 3


def test_the_plan_and_the_runtime_know():
    llm = model(activations="int8")
    note = next(note for name, _, note in llm.plan().items if name == "weights")
    assert note.endswith("; a prompt's activations in int8")
    with llm.session() as session:
        assert {of.query_bits for of in session.runtime.setup.softmax} == {8}
    with model().session() as session:
        assert {of.query_bits for of in session.runtime.setup.softmax} == {16}


@pytest.mark.parametrize("bank", ["int8", "model"])
def test_queries_meet_an_int8_bank_in_8_bits(bank):
    """Of a prompt, where the kernel does so; the control has the same model with 16 bits."""
    llm = model(activations="int8", bank=bank, dtype="bfloat16")
    found = []
    for bits in (8, 16):
        with llm.session() as session:
            runtime = session.runtime
            assert {of.query_bits for of in runtime.softmax} == {8}
            runtime.softmax = tuple(replace(of, query_bits=bits) for of in runtime.softmax)
            found.append(session.prefill(LONG).flatten().clone())
    q, k = torch.empty(1, 4, 16, dtype=torch.bfloat16), torch.empty(2, 8, 16, dtype=torch.int8)
    rounds = bank == "int8" and rounds_queries(q, k, Softmax(query_bits=8))  # x86 with VNNI
    assert torch.equal(*found) != rounds and apart(*found) < 0.03
    with model(bank=bank).session() as session:
        assert {of.query_bits for of in session.runtime.softmax} == {16}


def test_rows_of_one_are_no_rows_of_another(tmp_path):
    usual, rounded = model(), model(activations="int8")
    assert model_key(usual.loaded) != model_key(rounded.loaded)
    with rounded.session() as session:
        session.prefill(LONG)
        session.save(tmp_path / "s")
    with pytest.raises(SavedFileError, match="activations int8"):
        usual.restore(tmp_path / "s")
    with pytest.raises(SettingError, match="activations: found in sharing"):
        LLM.sharing(usual, activations="int8")


@pytest.mark.parametrize(
    "settings, words",
    [
        (dict(activations="int4"), "activations: found 'int4', expected one of auto, int8"),
        (dict(weights="auto"), "activations: found 'int8' beside weights in floats"),
        (dict(weights="float"), "activations: found 'int8' beside weights in floats"),
        (dict(backend="triton"), "activations: found 'int8' on cpu, expected 'auto'"),
        (dict(imagined_gpu=1 << 34), "activations: found 'int8' on cuda:0, expected 'auto'"),
    ],
)
def test_where_nothing_would_be_rounded_it_is_refused(settings, words):
    with pytest.raises(SettingError, match=words):
        LLM(None, load=False, **(dict(weights="int8", activations="int8", device="cpu") | settings))


def test_a_cut_through_a_group_is_refused():
    """Four heads of 16 over four ranks: o's columns are cut in the middle of 32."""
    config = tiny_config(layers=2, hidden=64, head_dim=16)
    with pytest.raises(SettingError, match=r"4 ranks, but 0\.o is cut at columns 16 to 32"):
        require_whole_steps(share_of(config, 1, 4), 4)
    wide = tiny_config(layers=2, hidden=64, head_dim=64, intermediate_size=256)
    require_whole_steps(share_of(wide, 1, 2), 2)
