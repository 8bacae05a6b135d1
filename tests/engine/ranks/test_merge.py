"""Selections of all ranks are those of one process, index by index, whatever ties there are."""

import pytest
import torch

from engine.ranks.merge import give, listed
from kernels.select.topk import select_topk, select_topk_ref

STEPS, AT_ONCE = 10_000, 100


def whole(value):
    """int32 [AT_ONCE] on the device."""
    return torch.full((AT_ONCE,), value, dtype=torch.int32)


def chosen(scores, lo, hi, k, room, backend):
    """(index, counts) of the k best of every row."""
    index = torch.empty(len(scores), room, dtype=torch.int32)
    counts = torch.empty(len(scores), dtype=torch.int32)
    select_topk(scores, lo, hi, k, index, counts, backend=backend)
    return index, counts


def planted(generator, heads, tokens, kind):
    """Scores [AT_ONCE, heads, tokens]: of few values, so that most places are contested; with NaN
    and infinities; -0 beside 0; zeros but for a few, as softmaxed scores are; or all different.
    """
    scores = torch.randn(AT_ONCE, heads, tokens, generator=generator)
    if kind == 0:
        return scores.mul(2).round()
    if kind == 1:
        scores = scores.round()
        scores[torch.rand(scores.shape, generator=generator) < 0.1] = float("nan")
        scores[torch.rand(scores.shape, generator=generator) < 0.02] = float("inf")
        scores[torch.rand(scores.shape, generator=generator) < 0.1] = float("-inf")
        return scores
    if kind == 2:
        return torch.where(scores > 0, 0.0, -0.0)
    if kind == 3:
        return torch.where(scores > 2, scores, 0.0)
    return scores


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_ten_thousand_steps_with_ties_choose_as_one_process(backend):
    generator = torch.Generator().manual_seed(41)
    for trial in range(STEPS // AT_ONCE):
        ranks = 2 + trial % 3
        tokens = [1, 7, 64, 193][trial % 4]
        k = [1, 5, 16, tokens][trial // 4 % 4]
        room = max(k, 1) + trial % 2
        lo, hi = trial % 3, tokens - trial % 5  # may be empty
        heads = planted(generator, ranks * 2, tokens, trial % 5)
        # NaN is the lowest score, so it never beats another head's
        maxima = torch.nan_to_num(heads, nan=float("-inf"), posinf=torch.inf, neginf=-torch.inf)
        given = whole(lo), whole(hi), whole(k), room
        want = torch.empty(AT_ONCE, room, dtype=torch.int32)
        counts = torch.empty(AT_ONCE, dtype=torch.int32)
        select_topk_ref(maxima.amax(1), *given[:3], want, counts)
        own = [heads[:, 2 * r : 2 * r + 2].amax(1) for r in range(ranks)]
        if trial % 5 == 1:  # a rank's maximum over its heads is NaN only where all are
            own = [maxima[:, 2 * r : 2 * r + 2].amax(1) for r in range(ranks)]
        lists = [listed(scores, chosen(scores, *given, backend)[0]) for scores in own]
        for scores in own:
            give(scores, torch.stack(lists))
            index, found = chosen(scores, *given, backend)
            assert torch.equal(index, want)
            assert torch.equal(found, counts)


def test_without_a_merge_ranks_choose_differently():
    generator = torch.Generator().manual_seed(3)
    heads = planted(generator, 4, 64, 4)
    given = whole(0), whole(64), whole(8), 8
    own = [chosen(heads[:, 2 * r : 2 * r + 2].amax(1), *given, "cpu")[0] for r in range(2)]
    assert not torch.equal(*own)


def test_nan_of_one_rank_gives_way_to_another_ranks_score():
    mine = torch.tensor([[float("nan"), 1.0, 0.0]])
    theirs = torch.tensor([[5.0, float("nan"), 0.5]])
    index = torch.tensor([[0, 1]], dtype=torch.int32)
    lists = torch.stack([listed(mine, index), listed(theirs, index)])
    give(mine, lists)
    assert mine.tolist() == [[5.0, 1.0, 0.0]]
