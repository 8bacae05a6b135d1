"""PoD together with SnapKV: against its rule simulated in float64, and reduced to SnapKV and to
PoD.

tests/engine/methods/test_methods.py has the eight properties. Stops: a layer that chooses for
itself where its block's lowest should, logits of rows that are other tokens, a distance counted in
kept rows instead of in the text, a proximal token whose logits come from below.
"""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.evict.pod_snapkv import PodSnapKV, kept_spans
from engine.methods.evict.snapkv import SnapKV
from engine.methods.full import Full
from engine.methods.select.pod import PodUntrained
from tests.builders import VOCAB, random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.evicting_simulation import Conversation, Rule
from tests.engine.methods.method_checks import SHAPES, llm_of
from tests.engine.methods.official_simulation import Model, Shape
from tests.engine.methods.test_evicting import play

LAYERS = 4
TURNS = ((70, 5), (13, 3))
BLOCKS = {1: (0, 2), 2: ((0, 2), (0, 1, 3)), 4: ((0, 2), (0, 1, 3), (0,), (0, 1, 2, 3))}


class PodConversation(Conversation):
    """As Conversation under SnapKV's rule; lows[layer][head]: the layer whose logits and choice a
    K/V head uses.
    """

    def __init__(self, model, rule, lows, first, recent):
        super().__init__(model, rule)
        self.lows, self.first, self.recent = lows, first, recent

    def _logits(self, layer, q, at):
        found, there = super()._logits(layer, q, at), np.arange(len(self.keys[layer]))
        distant = (there >= self.first) & (at[:, None] - there >= self.recent)
        for head, low in enumerate(self.lows[layer]):
            if low < layer:
                heads = slice(head * self.group, (head + 1) * self.group)
                lower = super()._logits(low, self.queries[low][at], at)[heads]
                found[heads] = np.where(distant, lower, found[heads])
        return found

    def _snap(self, layer):
        super()._snap(layer)
        for head, low in enumerate(self.lows[layer]):
            self.alive[layer][head] = self.alive[low][head]

    def kept(self, layer):
        """Positions that each K/V head of a layer holds."""
        return [np.flatnonzero(alive).tolist() for alive in self.alive[layer]]


@pytest.mark.parametrize(
    ("heads", "backend", "forget", "near"),
    [
        ((4, 4), "reference", False, (3, 16)),
        ((8, 2), "auto", True, (2, 24)),
        ((8, 1), "auto", True, (0, 7)),
        ((8, 2), "auto", False, (16, 300)),
    ],
)
def test_rows_and_logits_are_the_simulations(heads, backend, forget, near):
    """Two turns: groups of 1, 4 and 8 query heads, and a text of which nothing is distant."""
    config = tiny_config(layers=LAYERS, heads=heads[0], kv_heads=heads[1])
    weights, (first, recent) = tiny_weights(config, seed=sum(heads)), near
    llm = tiny_llm(Full(), config, weights, max_context=256, backend=backend, chunk=37)
    method = PodSnapKV(30, None, forget, window=6, blocks=BLOCKS[heads[1]], first=first)
    method = replace(method, recent=recent)
    rule = Rule("snapkv", 30, window=6, kernel=7)
    with llm.session(method) as session:
        lows = session.runtime.lowest
        assert min(map(min, lows)) < max(map(max, lows)) and lows[1] != (1,) * heads[1]
        model = Model(Shape(LAYERS, *heads, 64 // heads[0], 1e-5), weights)
        oracle = PodConversation(model, rule, lows, first, recent)
        every = random.Random(1).sample(range(VOCAB), VOCAB)
        for turn, (prompt, answer) in enumerate(((57, 12), (13, 9))):
            ids, every = every[: prompt + answer], every[prompt + answer :]
            found = session.prefill(ids[:prompt]).numpy()
            np.testing.assert_allclose(found, oracle.prompt(ids[:prompt]), atol=1e-4)
            for token in ids[prompt:]:
                found = session.decode(token).numpy()
                np.testing.assert_allclose(found, oracle.step(token), atol=1e-4)
                for layer in range(LAYERS):
                    assert session.runtime.positions(layer) == oracle.kept(layer), (turn, layer)
        assert session.bank.forgets == forget and session.stats.sparse_steps == 21
        assert session.runtime.rows_read(len(session))[0] < len(session)


def test_layers_of_a_block_keep_the_same_tokens_and_others_their_own():
    method = PodSnapKV(30, window=8, blocks=(0, 2, 5), first=4, recent=20)
    with llm_of(SHAPES[0]).session(method) as session:
        play(session, TURNS[:1])
        held = [session.runtime.positions(layer) for layer in range(session.plan.num_layers)]
        lows = session.runtime.lowest
        assert all(held[i] == held[lows[i][0]] for i in range(len(held)))
        assert held[0] != held[2] != held[5] != held[0]


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_without_sharing_it_is_snapkv_to_the_bit(shape):
    llm = llm_of(shape)
    alone = tuple(range(llm.config.num_layers))
    for blocks, near in ((None, (4, 20)), (alone, (4, 20)), ((0, 2), (4, 20))):
        snap = dict(tokens=30, window=8)
        one = PodSnapKV(**snap, blocks=blocks, first=near[0], recent=near[1])
        with llm.session(one) as a, llm.session(SnapKV(**snap)) as b:
            (logits, held), (expected, kept) = play(a, TURNS), play(b, TURNS)
            same = blocks != (0, 2)
            assert same == (held == kept) == torch.equal(logits, expected)
            assert max(a.runtime.rows_read(len(a))) < len(a)


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_a_budget_that_covers_the_text_is_pod(shape):
    llm, near = llm_of(shape), dict(first=4, recent=20)
    blocks = (0, 2, 4)
    method = PodSnapKV(tokens=500, window=8, blocks=blocks, **near)
    with llm.session(method) as a, llm.session(PodUntrained(blocks, **near)) as b:
        (logits, held), (expected, _) = play(a, TURNS), play(b, TURNS)
        torch.testing.assert_close(logits, expected, atol=5e-5, rtol=5e-5)
        assert held[-1][3][0] == list(range(len(a)))
    with llm.session(Full()) as full:
        assert (play(full, TURNS)[0] - expected).abs().max() > 1e-3


@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 20), st.integers(1, 40))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_spans_are_where_the_text_says(start, count, first, recent):
    """Rows of any positions: each that a query sees is in one span, by its place in the text."""
    generator = torch.Generator().manual_seed(start * 41 + count)
    stop = start + count
    older = torch.stack([torch.randperm(start, generator=generator)[: start // 2] for _ in "ab"])
    positions = torch.cat([older.sort(1).values, torch.arange(start, stop).expand(2, -1)], 1)
    spans = kept_spans(positions.int(), start, count, first, recent)
    for head, row in enumerate(positions.tolist()):
        for i in range(count):
            sink, new, far = ([row[j] for j in range(*s)] for s in bounds(spans, head, i))
            seen = [p for p in row if p <= start + i]
            assert sink == [p for p in seen if p < first]
            assert far == [p for p in seen if p >= first and p <= start + i - recent]
            assert sorted(sink + new + far) == seen


def bounds(spans, head, i):
    """(low, high) of each span for one query."""
    return [(int(low[head, 0, i]), int(high[head, 0, i])) for low, high in spans]


def test_bad_settings_are_named():
    for make, word in (
        (lambda: PodSnapKV(blocks=(1, 2)), "blocks: found"),
        (lambda: PodSnapKV(first=-1), "first"),
        (lambda: PodSnapKV(recent=0), "recent"),
        (lambda: PodSnapKV(tokens=8), "tokens: found 8"),
        (lambda: PodSnapKV(blocks=(0, 99)).plan(tiny_config()), "this model"),
    ):
        with pytest.raises(SettingError, match=word):
            make()
    assert PodSnapKV().tokens == 4096 and (PodSnapKV().first, PodSnapKV().recent) == (16, 4080)
    with llm_of(SHAPES[0]).session(Full()) as session:
        session.prefill(list(range(1, 40)))
        with pytest.raises(SettingError, match="pod_snapkv: reads prompts in its own way"):
            session.set_method(PodSnapKV(blocks=(0, 2)))


@pytest.mark.parametrize("tokens", [60, 300])
@pytest.mark.parametrize("bank", ["model", "int8"])
def test_rows_that_a_method_before_left_in_host_memory_are_read_as_any(tokens, bank):
    """A layer's own rows and a lower one's K come through the same buffers there."""
    config = tiny_config(7, head_dim=32)
    method = PodSnapKV(tokens=tokens, blocks=(0, 2, 5), first=8, recent=40, forget=False)
    weights = tiny_weights(config, seed=3)
    llm = tiny_llm(Full(), config, weights, max_context=320, chunk=16, bank=bank)
    ids, found = random_ids(167), []
    for offload in ("device", "host"):
        with llm.session(Full(), offload=offload) as session:
            session.set_method(method)
            assert session.bank.on_host(4) == (offload == "host")
            found.append([session.prefill(ids), *map(session.decode, (3, 1))])
    assert all(map(torch.equal, *found))
