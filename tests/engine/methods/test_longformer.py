"""Longformer's patterns: the mask is its definition, in prompts and answers, over what is held.

The oracle is a dense float64 model under the mask as the paper defines it, pair by pair; without
gaps and global tokens the method is window attention, to the bit. Stops: a gap that is counted from
elsewhere than the query, a global token that is not seen or does not see, a row that goes while a
later query still sees it, or stays though none does.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.base.errors import SettingError
from engine.methods.evict.longformer import Longformer, LongformerRuntime
from engine.methods.evict.window import Window
from engine.methods.full import Full
from tests.builders import GROUPS, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.official_simulation import Model, Shape

LAYERS = 3
KINDS = {
    "gaps": Longformer(tokens=7, dilation=3, first=0),
    "gaps by layer": Longformer(tokens=9, dilation=(1, 2, 4), first=2),
    "globals": Longformer(tokens=12, first=3),
    "globals in the middle": Longformer(tokens=8, dilation=2, first=1, positions=(20, 47, 90)),
    "a global to come": Longformer(tokens=5, dilation=2, first=0, positions=(104,)),
    "one token": Longformer(tokens=1, dilation=5, first=1),
}
# lengths 1, a chunk and one beside it, primes
TURNS = ((1, 2), (90, 14), (16, 3), (17, 5))


def sees(method, layer, queries, keys):
    """The definition: bool [queries, keys] of two arrays of positions."""
    gap = method.dilation[layer] if isinstance(method.dilation, tuple) else method.dilation
    i, j = np.asarray(queries)[:, None], np.asarray(keys)
    everywhere = [*range(method.first), *method.positions]
    window = ((i - j) % gap == 0) & ((i - j) // gap < method.tokens)
    return (j <= i) & (window | np.isin(i, everywhere) | np.isin(j, everywhere))


class Masked:
    """A dense float64 model under the mask."""

    def __init__(self, model, method):
        self.model, self.method, self.ids = model, method, []

    def read(self, ids):
        """Logits of the last token."""
        self.ids += ids
        model, at = self.model, np.arange(len(self.ids))
        x = model.weights["model.embed_tokens.weight"][self.ids]
        for layer in range(model.shape.layers):
            normed = model.norm(x, f"model.layers.{layer}.input_layernorm.weight")
            q, k, v = (model.project(layer, part, normed) for part in "qkv")
            mask = sees(self.method, layer, at, at)
            x = model.rest(
                layer, x, model.attend(model.rotate(q, at), model.rotate(k, at), v, mask)
            )
        return model.head(x[-1])


def made(heads=(4, 2), **settings):
    """(LLM, its float64 model)."""
    config = tiny_config(layers=LAYERS, heads=heads[0], kv_heads=heads[1])
    weights = tiny_weights(config, seed=sum(heads))
    given = dict(max_context=512, backend="reference", chunk=16) | settings
    shape = Shape(LAYERS, *heads, 64 // heads[0], 1e-5)
    return tiny_llm(Full(), config, weights, **given), Model(shape, weights)


@pytest.mark.parametrize(
    ("heads", "backend", "forget", "chunk"),
    [
        (GROUPS[0], "reference", True, 16),
        (GROUPS[1], "auto", True, 37),
        (GROUPS[2], "auto", False, 512),
    ],
)
@pytest.mark.parametrize("name", KINDS)
def test_the_mask_is_its_definition(name, heads, backend, forget, chunk):
    method = replace(KINDS[name], forget=forget)
    llm, model = made(heads, backend=backend, chunk=chunk)
    oracle = Masked(model, method)
    with llm.session(method) as session:
        for turn, (prompt, answer) in enumerate(TURNS):
            ids = random_ids(prompt + answer, seed=turn)
            found = session.prefill(ids[:prompt]).numpy()
            np.testing.assert_allclose(found, oracle.read(ids[:prompt]), atol=1e-4)
            for token in ids[prompt:]:
                found = session.decode(token).numpy()
                np.testing.assert_allclose(found, oracle.read([token]), atol=1e-4)
                assert_held(session, method)
        assert session.bank.forgets == forget
        assert session.stats.sparse_steps == sum(answer for _, answer in TURNS)


def assert_held(session, method):
    """Every row that a later query sees, and none beyond the window's span and the global ones,
    once these have been read.
    """
    n = len(session)
    for layer in range(LAYERS):
        gap = method.gaps(LAYERS)[layer]
        later = sees(method, layer, range(n, n + 99), range(n)).any(0)
        needed = set(np.flatnonzero(later).tolist())
        for head in session.runtime.positions(layer):
            assert needed <= set(head) and len(head) == len(set(head))
            budget = (method.tokens - 1) * gap + 1 + method.globals
            assert len(head) == (n if n <= method.late else min(n, budget))


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("heads", GROUPS)
def test_without_gaps_and_globals_it_is_the_window_to_the_bit(heads, backend):
    llm, _ = made(heads, backend=backend)
    for forget in (False, True):
        with (
            llm.session(Longformer(tokens=24, first=0, forget=forget)) as one,
            llm.session(Window(tokens=24, forget=forget)) as other,
        ):
            for prompt, answer in TURNS:
                ids = random_ids(prompt + answer, seed=prompt)
                assert torch.equal(one.prefill(ids[:prompt]), other.prefill(ids[:prompt]))
                for token in ids[prompt:]:
                    assert torch.equal(one.decode(token), other.decode(token))
            assert one.runtime.positions(1) == other.runtime.positions(1)
            assert one.runtime.nbytes == other.runtime.nbytes


def test_its_own_mask_without_gaps_is_the_window(monkeypatch):
    """The general path, which the method above does not take."""
    monkeypatch.setattr(Longformer, "is_window", False)
    llm, _ = made()
    with (
        llm.session(Longformer(tokens=24, first=0)) as one,
        llm.session(Window(tokens=24)) as other,
    ):
        ids = random_ids(90)
        torch.testing.assert_close(one.prefill(ids), other.prefill(ids), atol=2e-5, rtol=0)
        for token in random_ids(5, seed=1):
            torch.testing.assert_close(one.decode(token), other.decode(token), atol=2e-5, rtol=0)


@pytest.mark.parametrize("floats", [1, 3000])
def test_blocks_of_queries_change_nothing(monkeypatch, floats):
    method, found = KINDS["globals in the middle"], []
    llm, _ = made(chunk=100)
    for small in (False, True):
        with monkeypatch.context() as patch, llm.session(method) as session:
            if small:
                module = "engine.methods.evict.longformer.tile_floats"
                patch.setattr(module, lambda device: floats)
            found.append(session.prefill(random_ids(100)))
    torch.testing.assert_close(*found, atol=2e-5, rtol=0)


def test_a_prompts_block_reads_its_span_and_the_globals_only(monkeypatch):
    seen, masked = [], LongformerRuntime._masked

    def noted(self, q, k, v, positions, rows, start, gap, window, softmax):
        seen.append((start, q.shape[1], positions[rows].tolist()))
        return masked(self, q, k, v, positions, rows, start, gap, window, softmax)

    monkeypatch.setattr(LongformerRuntime, "_masked", noted)
    monkeypatch.setattr("engine.methods.evict.longformer.tile_floats", lambda device: 1)
    llm, _ = made(chunk=64)
    with llm.session(Longformer(tokens=6, dilation=3, first=2, positions=(40,))) as session:
        session.prefill(random_ids(256))
    assert max(len(rows) for start, _, rows in seen if start > 64) == 15 + 16 + 3
    for start, count, rows in seen:
        low = 0 if start <= 40 < start + count else start - 15
        expected = {*range(max(0, low), start + count), 0, 1, 40}
        assert set(rows) == {at for at in expected if at < start + count}


def test_a_stream_holds_its_span_and_the_globals():
    config = tiny_config(layers=LAYERS, heads=4, kv_heads=2, max_positions=64)
    weights, method = tiny_weights(config, seed=6), Longformer(tokens=8, dilation=3, first=2)
    given = dict(max_context=None, chunk=16, backend="reference", forever=True)
    with pytest.warns(UserWarning, match="longformer sees tokens further away"):
        llm = tiny_llm(method, config, weights, **given)
    oracle, sizes = Masked(Model(Shape(LAYERS, 4, 2, 16, 1e-5), weights), method), set()
    with llm.session() as session:
        for turn in range(4):
            ids = random_ids(45, seed=turn)
            np.testing.assert_allclose(session.prefill(ids).numpy(), oracle.read(ids), atol=1e-4)
            token = [turn]
            np.testing.assert_allclose(session.decode(turn).numpy(), oracle.read(token), atol=1e-4)
            sizes.add((session.bank.nbytes, session.runtime.nbytes))
            assert session.runtime.positions(0)[0] == [
                0,
                1,
                *range(len(session) - 22, len(session)),
            ]
        assert len(sizes) == 1 and "2 global ones and the newest 22" in method.forgotten(184)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (dict(tokens=0), "tokens: found 0"),
        (dict(dilation=0), "dilation: found 0"),
        (dict(dilation=()), "dilation: found \\(\\), expected one number, or one per layer"),
        (dict(dilation=(1, 0)), "dilation: found 0"),
        (dict(dilation="wide"), "dilation: found 'wide', expected whole numbers"),
        (dict(first=-1), "first: found -1"),
        (dict(positions=(3, -2)), "positions: found -2"),
        (dict(positions=7), "positions: found 7, expected whole numbers"),
    ],
)
def test_bad_settings_are_one_line(settings, line):
    with pytest.raises(SettingError, match=line) as error:
        Longformer(**settings)
    assert "\n" not in str(error.value)


def test_gaps_of_another_model_are_refused():
    llm, _ = made()
    with pytest.raises(SettingError, match="dilation: found 2 numbers, expected one per layer, 3"):
        llm.session(Longformer(dilation=(1, 2)))
    found = Longformer(dilation=[1, 2, 3], positions=[9, 3, 9, 0])
    assert found.dilation == (1, 2, 3) and found.positions == (3, 9) and hash(found)
