"""The top-k's first histogram, counted by the kernel that writes the scores, interpreted: the same
choice as by a launch of its own, for scores that break careless counting.
"""

import math

import pytest
import torch

from kernels.attention.dense import SCORE_TILE, decode_dense, launch_head_max
from kernels.attention.scratch import ScratchShape, make_scratch
from kernels.select.topk import select_topk, select_topk_ref
from tests.kernels.support.kernel_checks import HOSTILE_ROWS, hostile_row, ints

HEADS, ROOM = 2, 300


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(11)


def chosen(scores, ranked, k, scratch, counted):
    """(out, counts) of the first `ranked` scores of every row."""
    out = torch.full((len(scores), ROOM), 99, dtype=torch.int32)
    counts = torch.full((len(scores),), 99, dtype=torch.int32)
    zero = torch.zeros_like(ranked)
    select_topk(scores, zero, ranked, k, out, counts, scratch, "triton", counted)
    return out, counts


def check(rows, lengths, ranked, k):
    """Rows [B, H, T] of logits become scores, which are counted on the way and chosen from."""
    batch, heads, capacity = rows.shape
    lengths, ranked, k = (ints(x, "cpu") for x in (lengths, ranked, k))
    largest = ScratchShape(batch, 1, heads, 1, 16, capacity, scored=True)
    scratch = make_scratch(largest, "cpu", "triton")
    scratch.logits[: rows.numel()] = rows.flatten()
    scores = torch.full((batch, capacity), math.inf)
    launch_head_max(scratch, lengths, scores, capacity, heads, 1, "raw", ranked)
    found = chosen(scores, ranked, k, scratch, counted=True)
    assert not scratch.hist.any(), "the next call counts on"
    apart = chosen(scores, ranked, k, scratch, counted=False)
    want = torch.full_like(found[0], 99), torch.full_like(found[1], 99)
    select_topk_ref(scores, torch.zeros_like(ranked), ranked, k, *want)
    for mine, theirs, expected in zip(found, apart, want):
        assert torch.equal(mine, theirs) and torch.equal(mine, expected)
    return found


@pytest.mark.parametrize("name", [*HOSTILE_ROWS, "one huge"])
def test_hostile_scores_are_chosen_from_alike(name, generator):
    """Every head holds them; ties run across the tiles of both kernels."""
    rows = [hostile_row("normal" if name == "one huge" else name, 1537, generator) for _ in "ab"]
    if name == "one huge":
        for row in rows:
            row[700] = 3e38
    logits = torch.stack([torch.stack([row, row]) for row in rows])
    check(logits, [1537, 1201], [1409, 1100], [ROOM, 77])


@pytest.mark.parametrize("n", [1, 2, SCORE_TILE - 1, SCORE_TILE, SCORE_TILE + 1, 1021, 1024, 1031])
def test_lengths_around_a_tile_of_either_kernel(n, generator):
    """Rows of one batch end in different tiles; one is chosen from to its end, one but its last."""
    logits = torch.randn(3, HEADS, 1100, generator=generator)
    check(logits, [n, n, 1100], [n, n - 1, 513], [64, n, 5])


def test_nothing_wanted_leaves_no_counts_behind(generator):
    """A budget of 0, and no row before the tail: what was counted is zeroed all the same."""
    logits = torch.randn(3, HEADS, 700, generator=generator)
    _, counts = check(logits, [700, 600, 40], [600, 0, 30], [0, 9, 9])
    assert counts.tolist() == [0, 0, 9]


def test_a_filter_layer_counts_the_scores_of_its_attention(generator):
    q = torch.randn(1, 1, 4, 16, generator=generator)
    k, v = torch.randn(2, 1, 2, 700, 16, generator=generator)
    n, ranked, most = ints([601], "cpu"), ints([577], "cpu"), ints([60], "cpu")
    for kind in ("softmax", "raw"):
        scratch = make_scratch(ScratchShape(1, 1, 4, 2, 16, 700, scored=True), "cpu", "triton")
        scores = torch.full((2, 1, 700), -1.0)
        out = decode_dense(q, k, v, n, 2.0, scores[0], kind, scratch, "triton", ranked)
        assert int(scratch.hist.sum()) == 577
        first = chosen(scores[0], ranked, most, scratch, counted=True)
        plain = decode_dense(q, k, v, n, 2.0, scores[1], kind, scratch, "triton")
        assert torch.equal(out, plain) and torch.equal(*scores)
        second = chosen(scores[1], ranked, most, scratch, counted=False)
        assert torch.equal(first[0], second[0]) and int(first[1]) == 60


def test_counts_elsewhere_are_refused():
    scores, one = torch.zeros(1, 64), ints([3], "cpu")
    with pytest.raises(ValueError, match="scratch: found none"):
        chosen(scores, one, one, None, counted=True)
