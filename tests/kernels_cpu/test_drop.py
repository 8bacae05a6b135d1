"""A row that leaves a store: C++ against torch's operators, and both against a loop."""

import math

import pytest
import torch

from kernels.attention.dense import decode_logged
from kernels.native.library import missing
from kernels.select.column_sums import column_sums
from kernels.select.drop import RULES, Steady, add_moments, drop_least

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())


def store(heads, rows, group, dtype=torch.float32, ties=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(heads, rows + 3, 16, generator=generator).to(dtype) for _ in range(2))
    positions = torch.stack([torch.randperm(rows + 3, generator=generator) for _ in range(heads)])
    scores = torch.rand(heads, group, rows + 3, generator=generator)
    return k, v, positions.int(), (scores * 3).floor() if ties else scores


def dropped(positions, scores, rows, how, below, above):
    """The slot that each head frees, by a loop over plain numbers."""
    rule = {"max": max, "sum": sum, "mean": lambda x: sum(x) / len(x)}[how]
    slots = []
    for head in range(len(positions)):
        ranked = []
        for t in range(rows):
            at = int(positions[head, t])
            score = rule(scores[head, :, t].tolist()) if scores is not None else 0.0
            ranked.append((math.inf if at < below or at >= above else score, at, t))
        slots.append(min(ranked)[2])
    return slots


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("how", RULES)
@pytest.mark.parametrize("heads, rows, group", [(1, 1, 1), (3, 16, 4), (2, 127, 8), (4, 65, 2)])
def test_the_least_row_goes_and_the_last_takes_its_place(heads, rows, group, how, ties, backend):
    for scored in (True, False):
        before = store(heads, rows, group, ties=ties)
        k, v, positions, scores = (t.clone() for t in before)
        given = scores if scored else None
        slots = dropped(before[2], before[3] if scored else None, rows, how, 3, rows - 2)
        drop_least(k, v, positions, given, rows, how, 3, rows - 2, backend)
        for head, slot in enumerate(slots):
            order = list(range(rows - 1))
            if slot < rows - 1:
                order[slot] = rows - 1
            for found, old in zip((k, v, positions), before):
                assert torch.equal(found[head, : rows - 1], old[head, order])
                assert torch.equal(found[head, rows:], old[head, rows:])  # beyond: as they were
            if scored:
                assert torch.equal(scores[head, :, : rows - 1], before[3][head][:, order])


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_ranks_decide_in_place_of_scores_which_move_with_their_rows(backend):
    k, v, positions, scores = store(3, 33, 4)
    ranks = torch.rand(3, 33, generator=torch.Generator().manual_seed(5))
    ranks[1] = 0.5  # all alike: the oldest goes
    slots, before = ranks.argmin(1).tolist(), scores.clone()
    slots[1] = int(positions[1, :33].argmin())
    drop_least(k, v, positions, scores, 33, backend=backend, ranks=ranks)
    for head, slot in enumerate(slots):
        order = [32 if t == slot else t for t in range(32)]
        assert torch.equal(scores[head, :, :32], before[head][:, order])


def varied(heads, rows, seed, ties):
    """A store whose scores are sums of weights and of their squares, over as many queries as came
    since each row did."""
    k, v, positions, _ = store(heads, rows, 1, seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    weights = torch.rand(heads, 3, rows + 3, generator=generator) ** 4
    if ties:
        weights = (weights * 3).floor() / 4
    return k, v, positions, torch.stack([weights.sum(1), weights.square().sum(1)], 1)


def left_out(positions, scores, rows, newest, seen, count):
    """The slot that each head frees, by a loop in float32 numbers."""
    slots = []
    for head in range(len(positions)):
        ranked = []
        for t in range(rows):
            at = int(positions[head, t])
            mean, square = (scores[head, i, t] / float(seen - at) for i in range(2))
            deviation = (square - mean * mean).clamp(min=0).sqrt().item()
            fresh = at >= newest
            ranked.append((math.inf if fresh else deviation, at, t, mean.item(), fresh))
        kept = {t for _, _, t, _, _ in sorted(ranked, reverse=True)[:count]}
        by = [(math.inf if t in kept or fresh else mean, at, t) for _, at, t, mean, fresh in ranked]
        slots.append(min(by)[2])
    return slots


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("rows, recent", [(1, 0), (2, 1), (17, 3), (128, 10), (257, 0), (1031, 40)])
def test_rows_stay_whose_weights_vary_most_and_of_the_others_the_least_mean_goes(
    rows, recent, ties, backend
):
    for count in sorted({0, 1, rows // 3, rows - 1, rows, rows + 2}):
        before = varied(3, rows, rows + count, ties)
        seen = rows + 3
        mine = [t.clone() for t in before]
        slots = left_out(before[2], before[3], rows, seen - recent, seen, count)
        by = Steady(seen, count)
        drop_least(*mine, rows, keep_from=seen - recent, backend=backend, steady=by)
        for head, slot in enumerate(slots):
            order = list(range(rows - 1))
            if slot < rows - 1:
                order[slot] = rows - 1
            for found, old in zip(mine[:3], before[:3]):
                assert torch.equal(found[head, : rows - 1], old[head, order])
            assert torch.equal(mine[3][head, :, : rows - 1], before[3][head][:, order])


@pytest.mark.parametrize("how", RULES)
@pytest.mark.parametrize("heads, group, rows", [(1, 1, 1), (2, 4, 15), (3, 8, 16), (2, 3, 1031)])
def test_weights_and_their_squares_are_added_each_rounded(heads, group, rows, how):
    """To the bit of sums in turn: a fused multiply would round another way."""
    generator = torch.Generator().manual_seed(rows)
    scores = torch.rand(heads, 2, rows + 5, generator=generator)
    weights = torch.rand(heads, group, rows, generator=generator)
    found, reference, one = scores.clone(), scores.clone(), weights[:, 0].clone()
    add_moments(found, weights, how, "native")
    add_moments(reference, weights, how, "reference")
    for g in range(1, group):
        one = torch.maximum(one, weights[:, g]) if how == "max" else one + weights[:, g]
    one = one / group if how == "mean" else one
    expected = scores[..., :rows] + torch.stack([one, one.square()], 1)
    assert torch.equal(found[..., :rows], expected)
    assert torch.equal(found[..., rows:], scores[..., rows:])
    # torch may sum a group in another order
    torch.testing.assert_close(reference, found, atol=0, rtol=2e-6)


def test_rows_whose_weights_are_all_alike_do_not_vary():
    """Their mean square is the square of their mean, to the bit: a fused multiply would leave a
    rest, by which one of two would stay and not the newer.
    """
    k, v, positions, _ = store(64, 40, 1)
    positions[:, :40] = torch.arange(40)
    mean = torch.rand(64, 1, 43, generator=torch.Generator().manual_seed(3)) + 1
    seen = 40.0 - torch.arange(43)
    scores = torch.cat([mean * seen, mean.square() * seen], 1)
    scores[:, 1, :38] += torch.arange(38) * 1e-3 + 0.1  # all but the last two, seen once and twice
    drop_least(k, v, positions, scores, 40, backend="native", steady=Steady(40, 39))
    assert (positions[:, 38] == 39).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_rows_and_views_with_strides(dtype):
    k, v, positions, scores = store(4, 40, 2, dtype)
    wide = torch.zeros(4, 50, 2, 16, dtype=dtype)
    wide[:, :43, 0], wide[:, :43, 1] = k, v
    expected = [t.clone() for t in (k, v, positions, scores)]
    drop_least(*expected, 40, "max", 0, 30, "reference")
    drop_least(wide[:, :, 0], wide[:, :, 1], positions, scores, 40, "max", 0, 30, "native")
    assert torch.equal(wide[:, :39, 0], expected[0][:, :39])
    assert torch.equal(wide[:, :39, 1], expected[1][:, :39])
    assert torch.equal(positions[:, :39], expected[2][:, :39])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 257, 1031])
def test_attention_leaves_the_logits_whose_softmax_is_what_is_summed(rows, group, dtype):
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(1, 1, 2 * group, 64, generator=generator).to(dtype)
    k, v = (torch.randn(2, rows, 64, generator=generator).to(dtype) for _ in range(2))
    out, logits = decode_logged(q, k, v, 0.125)
    assert logits is not None and logits.shape == (2, group, 1, rows)
    wide = q.double().view(2, group, 1, 64) @ k.double().mT.unsqueeze(1) * 0.125
    weights = wide.softmax(-1)
    expected = (weights @ v.double().unsqueeze(1)).view(1, 1, -1, 64)
    torch.testing.assert_close(
        out.double(), expected, atol=2e-2 if dtype != q.float().dtype else 2e-6, rtol=0
    )
    plain = column_sums(q[0], k, rows - 1, 0.125)
    left = column_sums(q[0], k, rows - 1, 0.125, logits=logits)
    error = (plain.double() - weights.squeeze(2)).abs().max()
    assert (left.double() - weights.squeeze(2)).abs().max() <= 2 * error + 1e-6
    assert decode_logged(q, k, v, 0.125, backend="reference")[1] is None
