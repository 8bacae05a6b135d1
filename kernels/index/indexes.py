"""Indexes of K that choices are made by, and what a step's choices are bounded by."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from kernels.select.topk import select_topk

REDUCE = {"max": 0, "mean": 1, "sum": 2, "none": 3}


class Ends(NamedTuple):
    """What a step's choices are bounded by, and how many each takes, of B sequences one after the
    other: of each K/V head one, or of each query head.

    stop, room int32 [n]: the tokens below `stop` compete for `room` places; counts int32 [n], as
    `select_topk` leaves them. All contiguous.
    """

    stop: torch.Tensor
    room: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, eq=False)
class Index:
    """An index of one layer, and where its choices go: the same tensors in every step.

    scores float32 [n, T], last dim contiguous: what ranks the tokens; chosen int32 [n, K],
    contiguous: the choices, as `select_topk` leaves them. reduce: of REDUCE. scale: of logits.
    logits float32 [B, H, T]: every query's, or None.
    """

    scores: torch.Tensor
    chosen: torch.Tensor
    reduce: str
    scale: float = 1.0
    logits: torch.Tensor | None = None
    # of each sequence what choose.py tells the C++ kernel
    calls: list[Any] = field(default_factory=list, init=False)

    def take(self, ends: Ends, backend: str) -> None:
        """Choose by the scores, which are made."""
        first = torch.zeros_like(ends.stop)
        given = ends.stop, ends.room, self.chosen, ends.counts
        select_topk(self.scores, first, *given, backend=backend)


@dataclass(frozen=True, eq=False)
class Channels(Index):
    """By logits of some channels of K.

    rows [B, Hkv, R, T] floats, last dim contiguous: K by channel. channels int64 [Hkv, R],
    contiguous: which channel each row is of; None: there are rows of all D, and those r count whose
    |q|, summed over a K/V head's queries, is largest, the lower of equal ones, and logits are
    divided by the root of the part of |q| that these have. logits may be None only under "none" and
    fixed channels. weights float32 [B, H], contiguous, or None: takes what softmax gives the choice
    of a K/V head and the newest tokens.
    """

    rows: torch.Tensor = field(kw_only=True)
    channels: torch.Tensor | None = None
    r: int = 0
    weights: torch.Tensor | None = None


@dataclass(frozen=True, eq=False)
class Codes(Index):
    """By logits of codes: a token's is `scale` times the sum over parts of q times the centroid of
    its code.

    codes [B, Hkv, parts, T] uint8 or int32, last dim contiguous; centroids [B, Hkv, parts, C, D /
    parts] floats, whose last two dims are contiguous. first: so many tokens come before all others.
    logits: their softmax over the ranked tokens is what a group's heads are reduced by, and what is
    left there is of no use; None: logits are reduced, of one part. reduce: but "none".
    """

    codes: torch.Tensor = field(kw_only=True)
    centroids: torch.Tensor = field(kw_only=True)
    first: int = 0
