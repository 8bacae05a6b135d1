"""How a budget is divided among heads by rank: each gets as many tokens as it has of the highest
scores of all.

The threshold is found by bisection over the bits of float32, which order as the numbers do where
those are not negative. Nothing is sorted and nothing is copied.
"""

from __future__ import annotations

import torch

INFINITE = 0x7F800000  # bits of infinity


def counts_of_best(scores: list[torch.Tensor], total: int) -> list[list[int]]:
    """How many of the `total` highest scores lie in each row of each tensor [h, T], float32 from 0
    to infinity, or -1 where there is no token. The sum is `total`, or all there are; of equal
    scores at the threshold those of the first rows count.
    """
    bits = [t.contiguous().view(torch.int32) for t in scores]
    low, high = 0, INFINITE
    if total >= _at_least(bits, 0):
        return [(t >= 0).sum(1).tolist() for t in bits]
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _at_least(bits, middle) >= total else (low, middle - 1)
    counts = [(t > low).sum(1).tolist() for t in bits]
    left = total - sum(map(sum, counts))
    for rows, equal in zip(counts, [(t == low).sum(1).tolist() for t in bits]):
        for row, count in enumerate(equal):
            taken = min(left, count)
            rows[row] += taken
            left -= taken
    return counts


def _at_least(bits: list[torch.Tensor], least: int) -> int:
    """How many elements are not below `least`."""
    return int(torch.stack([(t >= least).sum() for t in bits]).sum())
