"""The context selector against OmniKV Eq. 3-4 in float64, from random models' forward passes and
from planted keys.

Stops: a query at the wrong position or seeing the future, a softmax over the wrong scores, heads
reduced in the wrong order, weights of the window upside down, a candidate missed or taken twice, a
tie broken by chance.
"""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import SettingError
from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.methods.omnikv.selector import window_weights
from engine.model.rope import apply_rope
from kernels.attention.dense import decode_dense
from kernels.select.topk import select_topk
from kernels.select.window_scores import window_scores
from tests.builders import random_ids, tiny_config, tiny_llm, tiny_weights
from tests.engine.methods.official_simulation import Model, Shape, check_choice
from tests.engine.methods.paper_simulation import Conversation, Rule, score

SELECTORS = ("last", "uniform", "exponential")
CAPACITY = 640


def world(layers, heads, kv_heads, seed):
    """(config, weights, float64 model)."""
    config = tiny_config(layers=layers, heads=heads, kv_heads=kv_heads)
    weights = tiny_weights(config, seed=seed)
    return config, weights, Model(Shape(layers, heads, kv_heads, 64 // heads, 1e-5), weights)


WORLDS = [world(7, 4, 1, 0), world(8, 8, 2, 1), world(7, 4, 4, 2)]


def run(place, rule, turns, backend="reference", chunk=512):
    """Engine and oracle through the same turns (ids, answer ids); returns selections compared and
    float32 ties among them.
    """
    config, weights, model = place
    method = OmniKV(
        filter_layers=rule.filters,
        tokens=rule.k,
        wait_layers=rule.wait,
        selector=rule.selector,
        scores="raw" if rule.raw else None,
        window=rule.window,
        tail=rule.tail,
        sink=rule.sink,
        dense_below=0,
    )
    llm = tiny_llm(method, config, weights, max_context=CAPACITY, backend=backend, chunk=chunk)
    oracle, compared, ties, steps = Conversation(model, rule), 0, 0, 0
    with llm.session() as session:
        for ids, answer in turns:
            np.testing.assert_allclose(session.prefill(ids).numpy(), oracle.prompt(ids), atol=1e-4)
            for token in answer:
                logits, steps = session.decode(token), steps + 1
                mine = session.selections
                choices, expected = oracle.step(token, mine)
                np.testing.assert_allclose(logits.numpy(), expected, atol=1e-4)
                assert set(mine) == set(oracle.source.values())
                for layer, chosen in mine.items():
                    ties += check_choice(
                        chosen, choices[layer], min(rule.k, len(choices[layer].scores))
                    )
                    assert len(chosen) < len(session)
                    compared += 1
        assert session.stats.sparse_steps == steps == session.stats.decode_steps
    return compared, ties


TURNS = [
    (random_ids(200, seed=1), random_ids(4, seed=2)),
    (random_ids(100, seed=3), random_ids(4, seed=4)),
]


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("selector", SELECTORS)
def test_selections_are_those_of_the_paper_in_float64(selector, backend):
    compared = ties = 0
    for number, (raw, tail, sink) in enumerate(itertools.product((False, True), (64, 128), (0, 4))):
        place, wait = WORLDS[number % 3], number % 3
        rule = Rule(
            (0, 3) if number % 2 else (1,),
            24,
            wait,
            selector,
            raw,
            (16, 3, 64)[number % 3],
            tail,
            sink,
        )
        found = run(place, rule, TURNS, backend)
        compared, ties = compared + found[0], ties + found[1]
    # 8 steps, 1 or 2 groups (with 2 waits one of (0, 3) is empty)
    assert compared == 88 and ties <= 1, (compared, ties)


@pytest.mark.parametrize("selector", SELECTORS)
def test_a_window_longer_than_the_text_and_across_turns(selector):
    """Candidates exist while the window of 64 still reaches before the start of the text, and it
    spans prompt and answer.
    """
    turns = [
        (random_ids(1, seed=1), random_ids(2, seed=2)),
        (random_ids(3, seed=3), random_ids(130, seed=4)),
        (random_ids(5, seed=5), random_ids(20, seed=6)),
    ]
    compared, ties = run(WORLDS[0], Rule((1,), 10, 0, selector, False, 64, 64), turns)
    assert compared == 152 and ties <= 1


def test_generated_tokens_compete_like_all_others():
    """By default every token before the tail is a candidate (the published code knows prompt tokens
    only).
    """
    config, weights, model = WORLDS[0]
    method = OmniKV(filter_layers=(1,), tokens=16, tail=64, dense_below=0)
    with tiny_llm(method, config, weights, max_context=CAPACITY).session() as session:
        session.prefill(random_ids(40))
        found = set()
        for token in random_ids(200, seed=3):
            session.decode(token)
            found |= {i for i in session.selections[1].tolist() if i >= 40}
        assert len(found) > 20


# ---------------------------------------------------------------- the three kernels together, on
# planted keys


def choose(q, k, selector, raw, lo, hi, count, backend):
    """What a filter layer does with queries q [1, W, H, D] and keys k [1, Hkv, n, D]: positions,
    ascending.
    """
    n, scale = k.shape[2], q.shape[3] ** -0.5
    lengths, scores = torch.tensor([n], dtype=torch.int32), torch.full((1, n), float("nan"))
    kind = "raw" if raw else "softmax"
    if selector == "last":
        decode_dense(
            q[:, -1:].contiguous(), k, k, lengths, scale, scores=scores, kind=kind, backend=backend
        )
    else:
        window_scores(
            q,
            k,
            lengths,
            scale,
            window_weights(selector, q.shape[1]),
            kind,
            scores,
            backend=backend,
        )
    out, counts = torch.full((1, count), -1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    bounds = [torch.tensor([x], dtype=torch.int32) for x in (lo, hi, count)]
    select_topk(scores, *bounds, out, counts, backend=backend)
    return out[0, : int(counts)].tolist()


@st.composite
def planted(draw):
    """(queries, scores, planted positions, first tail position): planted keys point along one
    head's queries, far above the noise.
    """
    kv_heads, group, dim = (
        draw(st.sampled_from((1, 2, 4))),
        draw(st.sampled_from((1, 2, 4))),
        draw(st.sampled_from((32, 64))),
    )
    n, window = draw(st.integers(150, 600)), draw(st.sampled_from((1, 16, 40)))
    hi = n - draw(st.integers(64, 100))
    where = sorted(draw(st.sets(st.integers(0, hi - 1), min_size=1, max_size=24)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    base = torch.randn(1, 1, kv_heads * group, dim, generator=generator)
    q = base + 0.1 * torch.randn(1, window, kv_heads * group, dim, generator=generator)
    k = 0.3 * torch.randn(1, kv_heads, n, dim, generator=generator)
    # each under a kv head of its own choice: max over heads must find it
    for position in where:
        head = draw(st.integers(0, kv_heads - 1))
        direction = base[0, 0, head * group] / base[0, 0, head * group].norm()
        k[0, head, position] = (
            direction * (dim**0.5) * (1.5 + 0.1 * torch.rand(1, generator=generator))
        )
    return q, k, where, hi


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("selector", SELECTORS)
@settings(deadline=None, derandomize=True, max_examples=30)
@given(planted())
def test_planted_tokens_are_recalled_completely(selector, backend, case):
    """U8 at 1.0, with scores of either kind; what lies in the tail is never chosen."""
    q, k, where, hi = case
    for raw in (True, False):
        assert choose(q, k, selector, raw, 0, hi, len(where), backend) == where


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_planted_keys_in_a_session_are_read_at_the_next_step(backend):
    """A row whose key is the next query's own direction is chosen, wherever it lies: first, in the
    prompt, in the answer.
    """
    config, weights, _ = WORLDS[1]
    method = OmniKV(filter_layers=(2,), tokens=5, tail=64, dense_below=0)
    with tiny_llm(
        method, config, weights, max_context=CAPACITY, backend=backend
    ).session() as session:
        session.prefill(random_ids(200))
        for token in random_ids(150, seed=1):
            session.decode(token)
        session.decode(7)
        n, where = len(session), [0, 99, 199, 204, 255]
        raw = session.query_ring.read(2, torch.tensor([[n - 1]]))
        q = apply_rope(raw, *session.loaded.rotary.at(torch.tensor([[n - 1]])))[0, 0]
        k, _ = session.bank.kv(2)
        for number, position in enumerate(where):
            head = number % 8
            k[0, head // 4, position] = 40 * q[head] / q[head].norm()
        session.truncate(n - 1)
        session.decode(7)
        assert session.selections[2].tolist() == where


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("selector", SELECTORS)
def test_the_lowest_position_wins_a_tie(selector, backend):
    """Equal keys have equal scores: of 30 copies the first 7 are chosen, beside a better row after
    them.
    """
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 16, 4, 32, generator=generator)
    k = torch.zeros(1, 2, 200, 32)
    k[0, :, 20:50] = q[0, -1, 0]
    k[0, :, 90] = 2 * q[0, -1, 0]
    assert choose(q, k, selector, True, 0, 130, 8, backend) == [*range(20, 27), 90]


@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("raw", [False, True])
def test_scores_equal_the_plain_formula(selector, raw, backend):
    """Numbers, not ranks: within float32 of Eq. 3-4, causal per window query, for kv heads 1, 2 and
    4.
    """
    model = Model(Shape(1, 4, 2, 32, 1e-5), {})
    generator = torch.Generator().manual_seed(1)
    for kv_heads, n, window in ((1, 70, 16), (2, 300, 5), (4, 64, 64), (2, 9, 16)):
        model.shape = Shape(1, 4, kv_heads, 32, 1e-5)
        q, k = (
            torch.randn(1, window, 4, 32, generator=generator),
            torch.randn(1, kv_heads, n, 32, generator=generator),
        )
        scores, lengths = torch.full((1, n), float("nan")), torch.tensor([n], dtype=torch.int32)
        rule = Rule((0,), 1, selector=selector, raw=raw)
        used = q[:, -1:] if selector == "last" else q
        if selector == "last":
            decode_dense(
                used.contiguous(),
                k,
                k,
                lengths,
                32**-0.5,
                scores=scores,
                kind="raw" if raw else "softmax",
                backend=backend,
            )
        else:
            window_scores(
                q,
                k,
                lengths,
                32**-0.5,
                window_weights(selector, window),
                "raw" if raw else "softmax",
                scores,
                backend=backend,
            )
        # queries before the start of the text do not exist
        live = used[0, -min(n, used.shape[1]) :]
        expected = score(model, live.double().numpy(), k[0].transpose(0, 1).double().numpy(), rule)
        # what the oldest query cannot see is never a candidate
        if raw:
            scores, expected = scores[:, : n - len(live) + 1], expected[: n - len(live) + 1]
        np.testing.assert_allclose(scores[0].numpy(), expected, rtol=2e-5, atol=2e-6)


def test_window_weights():
    """alpha of Eq. 4: all 1; 2^(j - W) up to a factor, newest heaviest; the newest alone."""
    assert window_weights("uniform", 4).tolist() == [1.0] * 4
    assert window_weights("exponential", 4).tolist() == [0.125, 0.25, 0.5, 1.0]
    assert (
        window_weights("exponential", 64).dtype == torch.float32
        and window_weights("exponential", 64)[0] > 0
    )
    assert window_weights("last", 16).tolist() == [1.0]
    with pytest.raises(SettingError, match="selector.*found 'first'.*last, uniform, exponential"):
        window_weights("first", 4)


def test_full_selects_nothing():
    config, weights, _ = WORLDS[0]
    with tiny_llm(Full(), config, weights, max_context=CAPACITY).session() as session:
        session.prefill(random_ids(300))
        session.decode(1)
        assert session.selections == {} and session.stats.sparse_steps == 0
