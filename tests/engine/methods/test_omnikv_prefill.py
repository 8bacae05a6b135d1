"""Chunked OmniKV-prefill: r covering the past is the dense prefill, and r below it is what the
paper's section D.10 says, in float64.

Stops: a selection of another block or chunk, scores of rows that a query cannot see, a boundary
that moves with the chunk, a dense end that is not dense, rows counted that were not read, work that
is not the work done.
"""

from functools import partial

import numpy as np
import pytest
import torch

from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.plan.layers import Role
from engine.plan.prefill_time import PrefillFlops
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.official_simulation import (
    Choice,
    Model,
    Shape,
    check_choice,
    softmax,
    top,
)
from tests.engine.methods.paper_simulation import Conversation, Rule

CAPACITY, BLOCK, TAIL = 1024, 64, 64
CONFIG = tiny_config(layers=8, heads=6, kv_heads=2, hidden=48, head_dim=8)
WEIGHTS = tiny_weights(CONFIG, seed=4)
MODEL = Model(Shape(8, 6, 2, 8, 1e-5), WEIGHTS)
PROMPT = random_ids(700, seed=1)
FILTERS = (1, 4)  # and one wait layer each: sparse layers 3, 6 and 7


def method_of(ratio, **changes):
    """Blocks of 64 queries, a tail of 64, everything but the last 90 tokens sparse once the past is
    long enough.
    """
    settings = dict(prefill_ratio=ratio, prefill_block=BLOCK, prefill_dense_end=90)
    plan = dict(filter_layers=FILTERS, wait_layers=1)
    return OmniKV(**plan | dict(tokens=24, tail=TAIL, dense_below=0) | settings | changes)


def opened(method, chunk=256, backend="auto"):
    """A session of a fresh LLM."""
    return tiny_llm(
        Full(), CONFIG, WEIGHTS, max_context=CAPACITY, chunk=chunk, backend=backend
    ).session(method)


def blocks_of(start, stop, total, chunk, ratio, dense_end=90):
    """(first, last, first row always seen or None where dense) of every block, chunk after chunk,
    written down anew.
    """
    for chunk_first in range(start, stop, chunk):
        edges = [
            chunk_first,
            *range((chunk_first // BLOCK + 1) * BLOCK, min(stop, chunk_first + chunk), BLOCK),
        ]
        for first, last in zip(edges, [*edges[1:], min(stop, chunk_first + chunk)]):
            local = max(0, first // 64 * 64 - TAIL)
            yield first, last, None if total - last < dense_end or local <= ratio * BLOCK else local


class Oracle(Conversation):
    """The prompt under the rule: float64, layer by layer, one query at a time where sparse."""

    def __init__(self, ratio, stride=1, dense_end=90):
        super().__init__(MODEL, Rule(FILTERS, 24, tail=TAIL))
        self.ratio, self.stride, self.dense_end, self.choices = ratio, stride, dense_end, {}

    def read(self, ids, chunk):
        """Logits of the last token; `choices` holds every block's selection under (filter layer,
        first).
        """
        start, stop = len(self), len(self) + len(ids)
        blocks = list(blocks_of(start, stop, stop, chunk, self.ratio, self.dense_end))
        x = MODEL.weights["model.embed_tokens.weight"][list(ids)]
        for layer in range(MODEL.shape.layers):
            q = self._append(layer, x)
            keys, values = self.keys[layer], self.values[layer]
            mask = np.tri(len(ids), stop, start, dtype=bool)
            for first, last, local in blocks:
                if local is None:
                    continue
                rows = slice(first - start, last - start)
                if layer in FILTERS:
                    logits = np.where(
                        mask[rows][:: self.stride],
                        MODEL.logits_of(q[rows][:: self.stride], keys),
                        -np.inf,
                    )
                    scores = softmax(logits).max(axis=0).sum(axis=0)[:local]
                    self.choices[layer, first] = Choice(top(scores, self.ratio * BLOCK), scores, 0)
                if layer in self.source:
                    unseen = np.setdiff1d(
                        np.arange(local), self.choices[self.source[layer], first].indices
                    )
                    mask[rows, unseen] = False
            x = MODEL.rest(layer, x, MODEL.attend(q, keys, values, mask))
        return MODEL.head(x[-1])


# ------------------------------------------------------------------ r covers the past


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 256, 999])
def test_r_that_covers_the_past_is_dense_prefill(chunk, backend):
    prompt = PROMPT[:80] if chunk == 1 else PROMPT[:430]
    with (
        opened(method_of(16), chunk, backend) as session,
        opened(Full(), chunk, backend) as dense,
        opened(Full(), 1024) as whole,
    ):
        logits = session.prefill(prompt)
        assert torch.equal(logits, dense.prefill(prompt))
        torch.testing.assert_close(logits, whole.prefill(prompt), atol=1e-4, rtol=0)
        assert (
            logits.argmax() == whole.last_logits.argmax() and session.runtime.prefill.rows_read == 0
        )
        for layer in range(CONFIG.num_layers):
            for mine, theirs in zip(
                session.bank.kv(layer, len(prompt)), whole.bank.kv(layer, len(prompt))
            ):
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


# ------------------------------------------------------------------ r below the past


@pytest.mark.parametrize(
    "ratio, chunk, stride, dense_end",
    [
        (1, 256, 1, 90),
        (2, 256, 1, 90),
        (1, 128, 4, 0),
        (1, 100, 1, 90),
        (1, 64, 16, 200),
        (2, 999, 1, 0),
        (1, 37, 1, 1),
        (1, 256, 100, 90),
    ],
)
def test_against_float64(ratio, chunk, stride, dense_end):
    """Logits of prompt and first steps, and the last sparse blocks' selections, for the CPU's and
    the reference launchers.
    """
    oracle = Oracle(ratio, stride, dense_end)
    expected = oracle.read(PROMPT, chunk)
    assert len(oracle.choices) >= 8
    for backend in ("auto", "reference"):
        with opened(
            method_of(ratio, prefill_stride=stride, prefill_dense_end=dense_end), chunk, backend
        ) as session:
            np.testing.assert_allclose(session.prefill(PROMPT).numpy(), expected, atol=2e-4)
            compared = 0
            for key, index in session.runtime.prefill.selections().items():
                assert len(index) == ratio * BLOCK
                check_choice(index.numpy(), oracle.choices[key], ratio * BLOCK)
                compared += 1
            assert compared


def test_sparse_prefill_is_not_dense_prefill():
    """The same prompt read densely gives other logits: what the tests above compare is sparse."""
    with opened(method_of(1)) as session, opened(Full()) as dense:
        assert (session.prefill(PROMPT) - dense.prefill(PROMPT)).abs().max() > 1e-3


@pytest.mark.parametrize("chunk", [64, 128, 192, 448])
def test_chunks_of_whole_blocks_do_not_change_the_result(chunk):
    with opened(method_of(1), chunk) as session, opened(method_of(1), 1024) as whole:
        torch.testing.assert_close(
            session.prefill(PROMPT), whole.prefill(PROMPT), atol=1e-4, rtol=0
        )
        assert session.last_logits.argmax() == whole.last_logits.argmax()
        mine, theirs = session.runtime.prefill.selections(), whole.runtime.prefill.selections()
        assert len(theirs) >= 10 and mine.keys() <= theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


# ------------------------------------------------------------------ after it


def test_decode_second_turn_and_truncate():
    """A sparse prefill leaves a bank like any other: steps, a second prompt from where it ends, and
    going back.
    """
    oracle = Oracle(1)
    with opened(method_of(1)) as session:
        np.testing.assert_allclose(
            session.prefill(PROMPT[:500]).numpy(), oracle.read(PROMPT[:500], 256), atol=2e-4
        )
        for token in (5, 9, 3):
            _, expected = oracle.step(token, {})
            np.testing.assert_allclose(session.decode(token).numpy(), expected, atol=2e-4)
        assert session.stats.sparse_steps == 3
        mark = len(session)
        expected = oracle.read(PROMPT[500:], 256)
        first = session.prefill(PROMPT[500:])
        np.testing.assert_allclose(first.numpy(), expected, atol=2e-4)
        assert any(key[1] >= mark for key in oracle.choices), (
            "the second prompt was short enough to be dense"
        )
        session.truncate(mark)
        assert torch.equal(session.prefill(PROMPT[500:]), first)


def test_an_interrupted_prefill_keeps_its_chunks_and_goes_on():
    class Stop(Exception):
        pass

    def interrupt(progress):
        if progress.done >= 512:
            raise Stop

    with opened(method_of(1)) as session, opened(method_of(1)) as never:
        with pytest.raises(Stop):
            session.prefill(PROMPT, progress=interrupt)
        assert len(session) == 512
        never.prefill(PROMPT)
        torch.testing.assert_close(
            session.prefill(PROMPT[512:]), never.last_logits, atol=1e-4, rtol=0
        )


# ------------------------------------------------------------------ counts


@pytest.mark.parametrize("ratio, chunk, stride", [(1, 256, 1), (2, 100, 16), (1, 37, 3)])
def test_rows_and_operations_are_those_of_a_count_by_hand(ratio, chunk, stride):
    """rows_read against a loop over blocks; work against a loop over queries: 4 x D x heads a pair,
    half for a scored one.
    """
    pair, layers = 4.0 * CONFIG.q_size, CONFIG.num_layers
    rows, pairs = 0, 0.0
    for first, last, local in blocks_of(0, len(PROMPT), len(PROMPT), chunk, ratio):
        rows += 0 if local is None else 2 * (ratio * BLOCK + first - local)
        # layer 7, sparse, attends for the prompt's last token only, which is dense here
        for position in range(first, last):
            dense = position + 1
            sparse = dense if local is None else ratio * BLOCK + position + 1 - local
            pairs += pair * (5 * dense + 2 * sparse)
            if local is not None and (position - first) % stride == 0:
                pairs += pair * 2 * 0.5 * local
    with opened(method_of(ratio, prefill_stride=stride), chunk) as session:
        session.prefill(PROMPT)
        assert session.runtime.prefill.rows_read == rows > 0
        work = PrefillFlops.of(CONFIG)
        parts = [
            session.runtime.prompt_flops(work, first, min(len(PROMPT), first + chunk))
            for first in range(0, len(PROMPT), chunk)
        ]
    weights = CONFIG.hidden_size * (
        2 * CONFIG.q_size + 2 * CONFIG.kv_size + 3 * CONFIG.intermediate_size
    )
    last_one = CONFIG.hidden_size * (CONFIG.q_size + 2 * CONFIG.kv_size)
    assert sum(p[0] for p in parts) == pytest.approx(
        2 * len(PROMPT) * (weights * (layers - 1) + last_one)
    )
    assert sum(p[1] for p in parts) == pytest.approx(pairs)


def test_progress_counts_work():
    """At half the tokens of a dense prompt a good deal less than half the work is done; shares only
    grow, and end at 1.
    """
    seen = []
    with opened(method_of(1), 64) as session:
        session.prefill(PROMPT, progress=seen.append)
        parts = partial(session.runtime.prompt_flops, PrefillFlops.of(CONFIG))
        total = sum(parts(0, len(PROMPT)))
        for progress in seen:
            assert progress.work == pytest.approx(sum(parts(0, progress.done)) / total)
    assert seen[-1].work == 1.0 and seen[-1].done == len(PROMPT) and seen[-1].eta == 0.0
    assert [p.work for p in seen] == sorted(p.work for p in seen) and all(
        p.work < p.done / p.total for p in seen[:-1]
    )


def test_roles_of_this_file():
    with opened(method_of(1)) as session:
        assert [i for i, role in enumerate(session.plan.roles) if role is Role.SPARSE] == [3, 6, 7]
