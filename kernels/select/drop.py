"""A store of K and V drops a row per K/V head: the one of the least score, of equal scores the
older. The last row takes its place, so that rows stay without gaps, in no order.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import NamedTuple

import torch

from kernels.launch.dispatch import choose
from kernels.native.library import Binding, Case, check, loaded

RULES = ("max", "mean", "sum")  # how the scores of a group's query heads become one
NEWEST = torch.iinfo(torch.int32).max


class _Call(ctypes.Structure):
    """`Call` of drop.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("k", "v")),
        *((name, ctypes.c_long) for name in ("key_head", "key_row", "value_head", "value_row")),
        ("positions", ctypes.c_void_p),
        ("position_head", ctypes.c_long),
        ("scores", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("score_head", "score_query")),
        ("ranks", ctypes.c_void_p),
        ("rank_head", ctypes.c_long),
        *(
            (name, ctypes.c_int)
            for name in (
                "key_bytes",
                "value_bytes",
                "heads",
                "group",
                "rows",
                "how",
                "keep_below",
                "keep_from",
                "seen",
                "steady",
            )
        ),
    ]


class Steady(NamedTuple):
    """Of scores that are the sums of a row's weights and those of their squares. seen: tokens so
    far, at least 1 and past every position; kept: rows that stay because their weights vary most.
    """

    seen: int
    kept: int


_BINDING = Binding("dropping a row", omnikv_sizeof_drop_call=_Call)


def drop_least(
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    scores: torch.Tensor | None,
    rows: int,
    how: str = "max",
    keep_below: int = 0,
    keep_from: int = NEWEST,
    backend: str = "auto",
    ranks: torch.Tensor | None = None,
    steady: Steady | None = None,
) -> None:
    """Drop one of the first `rows` rows of each head.

    k, v [h, T, width] floats or packed, last dim contiguous; positions int32 [h, T]; scores float32
    [h, G, T], reduced over G by `how`, or None, which are all alike; ranks float32 [h, rows], last
    dim contiguous, decide in their place; with `steady` scores are [h, 2, T] and `steady_ranks`
    decide. Rows at positions below `keep_below`, or from `keep_from` on, go only where there are no
    others. Mutates all four: the row at rows - 1 is free afterwards. Raises ValueError for an
    unknown backend, MemoryError where the kernel finds no room for its own.
    """
    if choose(backend, k, _BINDING.usable) == "native":
        _drop_natively(k, v, positions, scores, rows, how, keep_below, keep_from, ranks, steady)
        return
    held = positions[:, :rows]
    if steady is not None and scores is not None:
        ranks = steady_ranks(scores[:, :, :rows], held, keep_from, steady)
    elif ranks is None:
        ranks = torch.zeros_like(held, dtype=torch.float32)
        if scores is not None:
            ranks = reduce_group(scores[:, :, :rows], how)
    slots = worst(ranks.masked_fill((held < keep_below) | (held >= keep_from), float("inf")), held)
    heads = torch.arange(len(slots), device=slots.device)
    for tensor in (k, v, positions):
        tensor[heads, slots] = tensor[:, rows - 1].clone()  # one head: the two may be one place
    if scores is not None:
        scores[heads, :, slots] = scores[:, :, rows - 1].clone()


def steady_ranks(
    scores: torch.Tensor, positions: torch.Tensor, newest: int, steady: Steady
) -> torch.Tensor:
    """RoCo's ranks [h, T] of rows: the mean of the weights that each has received, infinite for
    positions from `newest` on and for the rows of the largest deviation, those among them; of equal
    ones the newer stay (Ren and Zhu 2024).

    scores float32 [h, 2, T]: sums of weights and of their squares, of all queries since a row's
    own; positions int [h, T].
    """
    seen = (steady.seen - positions).float()
    mean, square = scores[:, 0] / seen, scores[:, 1] / seen
    deviation = (square - mean.square()).clamp(min=0).sqrt()
    fresh = positions >= newest
    deviation.masked_fill_(fresh, float("inf"))
    kept = largest(deviation, positions, min(steady.kept, deviation.shape[1]))
    return mean.masked_fill(fresh, float("inf")).scatter(1, kept, float("inf"))


def largest(scores: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """Indices int64 [h, count] of the largest of scores [h, T] >= 0, in no order; of equal ones the
    newer token's. Bits of floats that are not negative have the order of the floats.
    """
    keys = (scores.abs().view(torch.int32).long() << 32) | positions.long()
    return keys.topk(count, 1, sorted=False).indices


def add_moments(
    scores: torch.Tensor, weights: torch.Tensor, how: str, backend: str = "auto"
) -> None:
    """Add a query's weights, reduced over a group, and their squares to what `steady_ranks` takes.

    scores float32 [h, 2, T], T >= n, last dim contiguous; weights float32 [h, G, n], contiguous;
    how: as in `drop_least`. Mutates the scores of the first n rows. Raises as `drop_least` does.
    """
    if choose(backend, scores, _BINDING.usable) == "native":
        _add_natively(scores, weights, how)
        return
    rows = weights.shape[2]
    one = reduce_group(weights, how)
    scores[:, 0, :rows] += one
    scores[:, 1, :rows] += one.square()


def worst(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Index int64 [h] of the smallest of scores [h, T]; of equal scores the older token's."""
    least = scores.amin(1, keepdim=True)
    return positions.masked_fill(scores != least, torch.iinfo(positions.dtype).max).argmin(1)


def reduce_group(scores: torch.Tensor, how: str) -> torch.Tensor:
    """Scores per query head [h, G, T] to one per K/V head [h, T]: "max", "mean" or "sum" over the
    group.
    """
    return scores.amax(1) if how == "max" else scores.mean(1) if how == "mean" else scores.sum(1)


def _add_natively(scores: torch.Tensor, weights: torch.Tensor, how: str) -> None:
    (heads, group, rows), (head, kind, _) = weights.shape, scores.stride()
    call = _Call(scores=scores.data_ptr(), score_head=head, score_query=kind)
    call.ranks, call.rank_head = weights.data_ptr(), weights.stride(0)
    call.heads, call.group, call.rows, call.how = heads, group, rows, RULES.index(how)
    check(loaded().omnikv_add_moments(ctypes.byref(call)), "adding weights and their squares")


def _drop_natively(
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    scores: torch.Tensor | None,
    rows: int,
    how: str,
    keep_below: int,
    keep_from: int,
    ranks: torch.Tensor | None = None,
    steady: Steady | None = None,
) -> None:
    sizes = k.element_size(), v.element_size()
    call = _Call(
        k.data_ptr(), v.data_ptr(),
        k.stride(0) * sizes[0], k.stride(1) * sizes[0],
        v.stride(0) * sizes[1], v.stride(1) * sizes[1],
        positions.data_ptr(), positions.stride(0),
        None if scores is None else scores.data_ptr(),
        0 if scores is None else scores.stride(0),
        0 if scores is None else scores.stride(1),
        None if ranks is None else ranks.data_ptr(),
        0 if ranks is None else ranks.stride(0),
        k.shape[2] * sizes[0], v.shape[2] * sizes[1],
        len(k), 0 if scores is None else scores.shape[1], rows, RULES.index(how),
        keep_below, keep_from, *(steady or (0, 0)),
    )  # fmt: skip
    check(loaded().omnikv_drop_least(ctypes.byref(call)), "dropping a row")


@_BINDING.self_test
def _dropped() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 3, 37, 16, generator=generator)
    positions = torch.stack([torch.randperm(37, generator=generator) for _ in range(3)]).int()
    some = torch.randint(0, 5, (3, 2, 37), generator=generator).float()  # equal scores too
    cases = [(how, scores, None) for how in RULES for scores in (some, None)]
    for how, scores, ranks in (*cases, ("max", some, some[:, 1])):
        mine = k.clone(), v.clone(), positions.clone(), None if scores is None else some.clone()
        theirs = k.clone(), v.clone(), positions.clone(), None if scores is None else some.clone()
        _drop_natively(*mine, 36, how, 4, 30, ranks)
        drop_least(*theirs, 36, how, 4, 30, "reference", None if ranks is None else ranks[:, :36])
        for found, expected in zip(mine[:3], theirs[:3]):
            yield f"a row dropped by {how}", found.float(), expected.float(), torch.float32
        if mine[3] is not None and theirs[3] is not None:
            yield f"scores where one is dropped by {how}", mine[3], theirs[3], torch.float32


@_BINDING.self_test
def _steady() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(2)
    k, v = torch.randn(2, 3, 40, 16, generator=generator)
    positions = torch.stack([torch.randperm(40, generator=generator) for _ in range(3)]).int()
    weights = torch.rand(3, 1, 40, generator=generator)
    scores = torch.cat([weights, weights.square()], 1)
    for count in (0, 12, 37):
        mine = k.clone(), v.clone(), positions.clone(), scores.clone()
        theirs = k.clone(), v.clone(), positions.clone(), scores.clone()
        by = Steady(50, count)
        _drop_natively(*mine, 37, "max", 0, 30, None, by)
        drop_least(*theirs, 37, "max", 0, 30, "reference", None, by)
        for found, expected in zip(mine, theirs):
            yield f"a row dropped beside {count}", found.float(), expected.float(), torch.float32
    for how in RULES:
        one, other = scores.clone(), scores.clone()
        new = torch.rand(3, 4, 37, generator=generator)
        _add_natively(one, new, how)
        add_moments(other, new, how, "reference")
        yield f"sums of squares by {how}", one, other, torch.float32
