"""Logits guessed from a few columns of K, and how far each token's is below its head's largest:
what InfiniGen (Lee et al., OSDI 2024, section 4.3) chooses by. A token's columns and a choice are
one call of C++ each on a CPU, else torch's operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.launch.dispatch import choose
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded

AT_ONCE = 4096  # tokens that torch's operators guess at a time
HOW = ("max", "mean")  # by their numbers in sketch.cpp


class _Guess(ctypes.Structure):
    """`Guess` of sketch.cpp."""

    _fields_ = [
        ("row", ctypes.c_void_p),
        ("row_head", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("skew", "held")),
        *((name, ctypes.c_long) for name in ("held_head", "held_column")),
        ("logits", ctypes.c_void_p),
        ("logit_query", ctypes.c_long),
        ("scores", ctypes.c_void_p),
        ("score_head", ctypes.c_long),
        *((name, ctypes.c_void_p) for name in ("stop", "room", "out", "counts")),
        *((name, ctypes.c_int) for name in ("heads", "group", "dim", "columns", "tokens")),
        *((name, ctypes.c_int) for name in ("token", "most", "how", "kind", "row_kind", "threads")),
        *((name, ctypes.c_float) for name in ("scale", "alpha")),
    ]


_BINDING = Binding("guesses of logits", omnikv_sizeof_guess=_Guess)


@dataclass(frozen=True, eq=False)
class Guessed:
    """A few columns of one layer's K, and where its choices go: the same tensors in every step.

    skew float32 [Hkv, D, r], contiguous, makes columns of K; held [B, Hkv, r, T], floats: they,
    each a run of tokens. logits float32 [B * H, T], scores float32 [B * Hkv, T]: take a query's
    guesses, and how far a token is below the largest. chosen int32 [B * Hkv, K], contiguous, takes
    the choices as `select_topk` leaves them. Last dims contiguous. scale: of logits. alpha, how: as
    in `guesses`.
    """

    skew: torch.Tensor
    held: torch.Tensor
    logits: torch.Tensor
    scores: torch.Tensor
    chosen: torch.Tensor
    scale: float
    alpha: float
    how: str
    # of each sequence what the C++ kernel is told
    calls: list[Any] = field(default_factory=list, init=False)


def learn_guessed(by: Guessed, b: int, token: int, k: torch.Tensor, backend: str = "auto") -> bool:
    """by.held[b, h, :, token] = k[h, 0] times the head's skew.

    k [Hkv, 1, D] floats. Returns whether the C++ kernel runs here and takes these; if not, nothing
    has changed. Mutates by.held. Raises ValueError for an unknown backend.
    """
    fits = k.shape[1] == 1 and k.dtype in FLOATS and by.held.dtype in FLOATS
    if choose(backend, by.held, lambda: fits and _BINDING.usable()) != "native":
        return False
    _learn(by, b, token, k)
    return True


def choose_guessed(
    by: Guessed,
    q: torch.Tensor,
    lengths: Sequence[int],
    stop: torch.Tensor,
    room: torch.Tensor,
    counts: torch.Tensor,
    backend: str = "auto",
) -> bool:
    """Choose the tokens below stop that are nearest to a head's largest guess, of the first
    `lengths` of each sequence: as many as are less than alpha below it, the mean of a sequence's
    heads rounded down, at least one, and at most room.

    q [B, H, D] floats; stop, room int32 [B * Hkv]. Returns whether the C++ kernel runs here and
    takes these; if not, nothing has changed. Mutates by.logits, by.scores, by.chosen and counts
    int32 [B * Hkv]. Raises ValueError for an unknown backend, MemoryError where the kernel finds no
    room for its own.
    """
    fits = q.dtype in FLOATS and by.held.dtype in FLOATS
    if choose(backend, q, lambda: fits and _BINDING.usable()) != "native":
        return False
    _choose(by, q, lengths, stop, room, counts)
    return True


def _call(by: Guessed, b: int) -> _Guess:
    """What the kernel is told of sequence b in every step."""
    for other in range(len(by.calls), b + 1):
        held, (heads, dim, columns) = by.held[other], by.skew.shape
        size, batch = held.element_size(), len(by.held)
        logits = by.logits[other * (len(by.logits) // batch) :]
        scores, chosen = by.scores[other * heads :], by.chosen[other * heads :]
        assert by.skew.is_contiguous() and by.chosen.is_contiguous()
        assert held.stride(2) == logits.stride(1) == scores.stride(1) == 1
        by.calls.append(_Guess(
            skew=by.skew.data_ptr(), held=held.data_ptr(), held_head=held.stride(0) * size,
            held_column=held.stride(1) * size, logits=logits.data_ptr(),
            logit_query=logits.stride(0), scores=scores.data_ptr(), score_head=scores.stride(0),
            out=chosen.data_ptr(), heads=heads, dim=dim, columns=columns, most=chosen.shape[1],
            how=HOW.index(by.how), kind=FLOATS[held.dtype], scale=by.scale, alpha=by.alpha,
        ))  # fmt: skip
    found: _Guess = by.calls[b]
    return found


def _learn(by: Guessed, b: int, token: int, k: torch.Tensor) -> None:
    call = _call(by, b)
    assert k.stride(2) == 1
    call.row, call.row_head = k.data_ptr(), k.stride(0) * k.element_size()
    call.row_kind, call.token = FLOATS[k.dtype], token
    check(loaded().omnikv_learn_guessed(ctypes.byref(call)), f"columns of keys in {k.dtype}")


def _choose(
    by: Guessed,
    q: torch.Tensor,
    lengths: Sequence[int],
    stop: torch.Tensor,
    room: torch.Tensor,
    counts: torch.Tensor,
) -> None:
    q, queries, lies = q.contiguous(), q.shape[1], q[0].numel() * q.element_size()
    for b, n in enumerate(lengths):
        call = _call(by, b)
        at = b * call.heads * 4  # bytes
        call.row, call.row_kind = q.data_ptr() + b * lies, FLOATS[q.dtype]
        call.group, call.tokens, call.threads = queries // call.heads, n, torch.get_num_threads()
        call.stop, call.room = stop.data_ptr() + at, room.data_ptr() + at
        call.counts = counts.data_ptr() + at
        check(loaded().omnikv_choose_guessed(ctypes.byref(call)), f"a guess in {q.dtype}")


def guesses(
    few: torch.Tensor,
    columns: torch.Tensor,
    logits: torch.Tensor,
    scores: torch.Tensor,
    alpha: float,
    how: str = "max",
) -> torch.Tensor:
    """Set scores [Hkv, n] to few . columns less the largest of the query head, as the query heads
    of a K/V head have it together ("max" | "mean"), by torch's operators and in few's dtype.

    few float32 or float64 [Hkv, G, r]; columns [Hkv, r, n], floats; logits [Hkv, G, n], whose
    values are lost. Returns how many of a head's scores are above -alpha: int32 [Hkv]. Mutates
    logits and scores.
    """
    n = columns.shape[2]
    for first in range(0, n, AT_ONCE):
        part = slice(first, min(n, first + AT_ONCE))
        logits[:, :, part] = few @ columns[:, :, part].to(few.dtype)
    if n:
        logits -= logits.amax(-1, keepdim=True)
        scores.copy_(logits.amax(1) if how == "max" else logits.mean(1))
    return (scores > -alpha).sum(1, dtype=torch.int32)


@_BINDING.self_test
def _several() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    k, q = torch.randn(2, 131, 24, generator=generator), torch.randn(1, 14, 24, generator=generator)
    for columns in (5, 19, 24):
        skew = torch.randn(2, 24, columns, generator=generator) / 24
        for dtype in FLOATS:
            for how in HOW:
                held = torch.zeros(1, 2, columns, 140, dtype=dtype)
                logits, scores = torch.zeros(14, 140), torch.zeros(2, 140)
                chosen = torch.zeros(2, 60, dtype=torch.int32)
                by = Guessed(skew, held, logits, scores, chosen, 0.5, 2.0, how)
                for t in range(131):
                    _learn(by, 0, t, k[:, t : t + 1].to(dtype))
                made = (k.to(dtype).float() @ skew).mT.to(dtype)
                yield f"columns of keys in {dtype}", held[0, :, :, :131], made, dtype
                stop, room, counts = (torch.full((2,), n, dtype=torch.int32) for n in (129, 50, 0))
                _choose(by, q.to(dtype), [131], stop, room, counts)
                few = q[0].to(dtype).float().view(2, 7, 24) @ skew * 0.5
                expected, room = torch.empty(2, 131), torch.empty(2, 7, 131)
                given = held[0, :, :, :131], room, expected, 2.0, how
                wanted = min(50, max(1, int(guesses(few, *given).sum()) // 2))
                yield f"guesses of logits in {dtype}", scores[:, :131], expected, torch.float32
                order = scores[:, :129].sort(descending=True, stable=True).indices
                best = order[:, :wanted].sort().values.int()
                name = f"a choice by guesses in {dtype}"
                yield name, chosen[:, :wanted], best, torch.int32
                yield name, counts, torch.full_like(counts, wanted), torch.int32
