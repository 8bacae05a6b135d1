"""Far keys as codes of one codebook a head, coded without their positions by a factor of the error
that queries see: what A2ATS (He et al., Findings of ACL 2025) chooses by. A token's code and a
choice are one call of C++ each on a CPU, else torch's operators.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.launch.dispatch import choose
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded
from kernels.sketch.rebuilt import turned

HOW = ("max", "mean", "sum")  # by their numbers in shares.cpp
_REDUCED: dict[str, Callable[..., torch.Tensor]] = dict(
    zip(HOW, (torch.amax, torch.mean, torch.sum))
)
AT_ONCE = 4096  # tokens that torch's operators take at a time
LANES = 16  # a head's dimensions are whole vectors

Turns = tuple[torch.Tensor, torch.Tensor]  # cos, sin float32 [R / 2], contiguous


class _Coded(ctypes.Structure):
    """`Coded` of shares.cpp."""

    _fields_ = [
        ("row", ctypes.c_void_p),
        ("row_head", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("factors", "centroids")),
        ("centroid_head", ctypes.c_long),
        ("codes", ctypes.c_void_p),
        ("code_head", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "stop", "room", "out", "counts")),
        *(
            (name, ctypes.c_int)
            for name in ("heads", "group", "dim", "pairs", "sums", "kind", "token")
        ),
        *((name, ctypes.c_int) for name in ("first", "most", "how", "threads")),
        ("scale", ctypes.c_float),
    ]


_BINDING = Binding("codes of far keys", omnikv_sizeof_coded=_Coded)


@dataclass(frozen=True, eq=False)
class Coded:
    """Codes of one layer's keys, and where its choices go: the same tensors in every step.

    factors float32 [Hkv, D, D], lower triangles L, contiguous; centroids float32 [B, Hkv, C, D],
    contiguous, of keys times L; codes uint8 [B, Hkv, T], last dim contiguous. scores float32 [B *
    Hkv, T]: torch's operators rank tokens there; chosen int32 [B * Hkv, K], contiguous: the
    choices, as `select_topk` leaves them. scale: of logits. how: what the weights of a group's
    heads become: of HOW. first: so many tokens come before all others.
    """

    factors: torch.Tensor
    centroids: torch.Tensor
    codes: torch.Tensor
    scores: torch.Tensor
    chosen: torch.Tensor
    scale: float
    how: str
    first: int
    # of each sequence what the C++ kernel is told
    calls: list[Any] = field(default_factory=list, init=False)


def learn_coded(
    by: Coded, b: int, token: int, k: torch.Tensor, back: Turns, backend: str = "auto"
) -> bool:
    """by.codes[b, h, token] = the centroid nearest to k[h, 0], turned by `back`, times the factor,
    of equal ones the first.

    k [Hkv, 1, D] floats. Returns whether the C++ kernel runs here and takes these; if not, nothing
    has changed. Mutates by.codes. Raises ValueError for an unknown backend.
    """
    fits = k.shape[1] == 1 and k.dtype in FLOATS
    if choose(backend, by.codes, lambda: fits and _fits(by)) != "native":
        return False
    _learn(by, b, token, k, back)
    return True


def choose_coded(
    by: Coded,
    q: torch.Tensor,
    far: Sequence[Turns],
    stop: torch.Tensor,
    room: torch.Tensor,
    counts: torch.Tensor,
    backend: str = "auto",
) -> bool:
    """Choose what `select_topk` chooses by the scores of `score_coded`, of the tokens below stop
    int32 [B * Hkv], room int32 [B * Hkv] of them.

    q [B, H, D] floats; far: of each sequence. Returns whether the C++ kernel runs here and takes
    these; if not, nothing has changed. Mutates by.chosen and counts int32 [B * Hkv]. Raises
    ValueError for an unknown backend, MemoryError where the kernel finds no room for its own.
    """
    if choose(backend, q, lambda: q.dtype in FLOATS and _fits(by)) != "native":
        return False
    _choose(by, q, far, stop, room, counts)
    return True


def _fits(by: Coded) -> bool:
    """Whether the C++ kernel runs here and takes such heads."""
    return not by.factors.shape[2] % LANES and _BINDING.usable()


def _call(by: Coded, b: int, turns: Turns) -> _Coded:
    """What the kernel is told of sequence b, with a step's turns."""
    for other in range(len(by.calls), b + 1):
        (heads, sums, dim), codes = by.centroids.shape[1:], by.codes[other]
        assert codes.stride(1) == 1 and by.chosen.is_contiguous()
        assert by.centroids[other].is_contiguous() and by.factors.is_contiguous()
        call = _Coded(
            factors=by.factors.data_ptr(),
            centroids=by.centroids[other].data_ptr(),
            centroid_head=sums * dim,
            codes=codes.data_ptr(),
            code_head=codes.stride(0),
            out=by.chosen[other * heads :].data_ptr(),
            heads=heads,
            dim=dim,
            sums=sums,
            first=by.first,
            most=by.chosen.shape[1],
            how=HOW.index(by.how),
            scale=by.scale,
        )
        by.calls.append(call)
    found: _Coded = by.calls[b]
    cos, sin = turns
    found.cos, found.sin, found.pairs = cos.data_ptr(), sin.data_ptr(), cos.shape[0]
    found.threads = torch.get_num_threads()
    return found


def _learn(by: Coded, b: int, token: int, k: torch.Tensor, back: Turns) -> None:
    call = _call(by, b, back)
    assert k.stride(2) == 1
    call.row, call.row_head = k.data_ptr(), k.stride(0) * k.element_size()
    call.kind, call.token, call.group = FLOATS[k.dtype], token, 1
    check(loaded().omnikv_learn_coded(ctypes.byref(call)), f"codes of keys in {k.dtype}")


def _choose(
    by: Coded,
    q: torch.Tensor,
    far: Sequence[Turns],
    stop: torch.Tensor,
    room: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    q, (_, queries, dim), size = q.contiguous(), q.shape, q.element_size()
    for b, turns in enumerate(far):
        call = _call(by, b, turns)
        group, at = queries // call.heads, b * call.heads * 4  # bytes
        call.row, call.row_head = q.data_ptr() + b * queries * dim * size, group * dim * size
        call.kind, call.group = FLOATS[q.dtype], group
        call.stop, call.room = stop.data_ptr() + at, room.data_ptr() + at
        call.counts = counts.data_ptr() + at
        check(loaded().omnikv_choose_coded(ctypes.byref(call)), f"a choice by codes in {q.dtype}")


def score_coded(by: Coded, q: torch.Tensor, far: Sequence[Turns], stops: Sequence[int]) -> None:
    """Leave in by.scores what a token's code weighs, of each sequence's tokens first .. stop - 1:
    the softmax over these of the logits that queries turned by `far` have with the centroids of
    codes, their factor undone; of the tokens before the first infinity. Equal codes weigh the same
    to the bit.

    By torch's operators. q [B, H, D] floats; far, stops: of each sequence.
    """
    heads, first = by.codes.shape[1], by.first
    scores = by.scores.view(len(q), heads, -1)
    scores[:, :, :first] = float("inf")
    for b, last in enumerate(stops):
        if last <= first:
            continue
        bounds = [*range(first, last, AT_ONCE), last]
        parts = [slice(*pair) for pair in zip(bounds, bounds[1:])]
        codes, centroids = by.codes[b], by.centroids[b]
        often = torch.zeros_like(centroids[:, :, 0])
        for part in parts:
            some = codes[:, part].long()
            often.scatter_add_(1, some, torch.ones_like(some, dtype=often.dtype))
        asked = turned(q[b].float(), *far[b]).view(heads, -1, q.shape[2])
        asked = torch.linalg.solve_triangular(by.factors, asked.mT, upper=False).mT
        logits = asked @ centroids.mT * by.scale  # [Hkv, G, C]
        logits = logits.masked_fill(often.unsqueeze(1) == 0, -math.inf)
        shares = (logits - logits.amax(-1, keepdim=True)).exp()
        shares = shares / (shares * often.unsqueeze(1)).sum(-1, keepdim=True)
        shares = _REDUCED[by.how](shares, 1)
        for part in parts:
            scores[b, :, part] = shares.gather(1, codes[:, part].long())


@_BINDING.self_test
def _coded() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    square, centroids = (
        torch.randn(*n, generator=generator) for n in ((2, 32, 32), (1, 2, 40, 32))
    )
    factors = square.tril() / 8 + 2 * torch.eye(32)
    q, k = torch.randn(1, 6, 32, generator=generator), torch.randn(2, 150, 32, generator=generator)
    angles = torch.randn(151, 12, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    for dtype in FLOATS:
        for how in HOW:
            scores, chosen = torch.zeros(2, 150), torch.zeros(2, 70, dtype=torch.int32)
            codes = torch.full((1, 2, 150), 39, dtype=torch.uint8)
            by = Coded(factors, centroids, codes, scores, chosen, 0.2, how, 4)
            for t in range(150):
                _learn(by, 0, t, k[:, t : t + 1].to(dtype), (cos[t], sin[t]))
            stop, room, counts = (torch.full((2,), n, dtype=torch.int32) for n in (137, 60, 0))
            given = q.to(dtype), [(cos[150], sin[150])]
            _choose(by, *given, stop, room, counts)
            score_coded(by, *given, [137])
            order = scores[:, :137].sort(descending=True, stable=True).indices[:, :60].sort(1)
            name = f"a choice by codes of far keys in {dtype}"
            yield name, chosen[:, :60], order.values.int(), torch.int32
        rows = turned(k.to(dtype).float(), cos[:150], sin[:150]) @ factors
        near = rows @ centroids[0].mT - centroids[0].square().sum(-1).unsqueeze(1) / 2
        yield (
            f"codes of far keys in {dtype}",
            codes[0],
            near.argmax(-1).to(torch.uint8),
            torch.uint8,
        )
