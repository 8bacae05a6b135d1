"""Events by K: where a boundary had better lie, and which keys stand for an event. Pure functions
of keys and positions.

Source: EM-LLM (Fountas et al., ICLR 2025), section 3.3, equations of modularity and conductance.
The graph's nodes are tokens, its weights the products of their keys, summed over the K/V heads of a
layer. As these weights are products, what is summed over all pairs of two sets of tokens is the
product of the sets' sums: a boundary costs a row of sums and no matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

MEASURES = ("modularity", "conductance", "none")


def measured(left: torch.Tensor, right: torch.Tensor, measure: str) -> torch.Tensor:
    """How good it is to part tokens so: the higher, the better; -inf where the graph has no weight.

    left, right float64 [Hkv, n, D]: sums of the keys of both sides of n boundaries -> float32 [n].
    """
    own, other, across = (
        (a * b).sum(-1).sum(0) for a, b in ((left, left), (right, right), (left, right))
    )
    one, two = own + across, other + across
    weight = one + two
    if measure == "modularity":
        found = (own + other) / weight - (one * one + two * two) / (weight * weight)
    else:
        found = -across / torch.minimum(one, two)
    # equal pairs of sides are equal, whatever the order of their sums was
    return found.float().masked_fill((one <= 0) | (two <= 0), float("-inf"))


def refined(
    sums: torch.Tensor, starts: Sequence[int], least: int, most: int, measure: str
) -> torch.Tensor:
    """Move every boundary but the first and the last back to where it parts the tokens between
    its neighbours best; of equal places the last. int64 [n - 2].

    sums float64 [Hkv, T + 1, D]: of the keys before each position; starts: n boundaries as surprise
    has them, least to most apart. A boundary stays behind the one before it, by `least`, and within
    `most` of the next, so that no two depend on each other.
    """
    placed = torch.tensor(starts, dtype=torch.int64, device=sums.device)
    before, own, after = placed[:-2], placed[1:-1], placed[2:]
    if measure == "none":
        return own
    place = torch.arange(starts[0] + 1, starts[-2] + 1, device=sums.device)
    event = torch.searchsorted(own, place)
    left, middle, right = (sums[:, at] for at in (before[event], place, after[event]))
    score = measured(middle - left, right - middle, measure)
    allowed = torch.maximum(before + least, after - most)
    score.masked_fill_(place < allowed[event], float("-inf"))
    best = torch.full(own.shape, float("-inf"), device=score.device)
    best.scatter_reduce_(0, event, score, "amax")
    found = torch.where(score == best[event], place, 0)
    return torch.zeros_like(own).scatter_reduce_(0, event, found, "amax")


def representatives(
    keys: torch.Tensor, sums: torch.Tensor, starts: torch.Tensor, count: int
) -> torch.Tensor:
    """The mean of the `count` keys of every event that are most like all keys of it, in their
    products; of equal ones the first. float64 [n - 1, Hkv, D].

    keys float64 [Hkv, T, D] and sums as `refined`'s; starts int64 [n]: where events begin and the
    last one ends, each `count` tokens at least.
    """
    heads, tokens, _ = keys.shape
    event = torch.searchsorted(starts, torch.arange(tokens, device=keys.device), right=True) - 1
    own = (sums[:, starts[1:]] - sums[:, starts[:-1]])[:, event.clamp(0, len(starts) - 2)]
    likeness = (keys * own).sum(-1).float()
    order = likeness.argsort(dim=1, descending=True, stable=True)
    order = order.gather(1, event[order].argsort(dim=1, stable=True))
    # an event's keys stand at its positions, the likest first
    first = starts[:-1].unsqueeze(1) + torch.arange(count, device=keys.device)
    chosen = order[:, first]  # [Hkv, n - 1, count]
    head = torch.arange(heads, device=keys.device)[:, None, None]
    return keys[head, chosen].mean(2).transpose(0, 1)
