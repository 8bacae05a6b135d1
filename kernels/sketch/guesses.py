"""Logits guessed from a few columns of K, and how far each token's is below its head's largest:
what InfiniGen (Lee et al., OSDI 2024, section 4.3) chooses by. By one call of C++ on a CPU, else by
torch's operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from kernels.launch.dispatch import choose
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded

AT_ONCE = 4096  # tokens that torch's operators guess at a time
HOW = ("max", "mean")  # by their numbers in sketch.cpp
WIDEST, GROUP = 1024, 128  # the most columns, and query heads of a K/V head, of the kernel


class _Guess(ctypes.Structure):
    """`Guess` of sketch.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("few", "rows")),
        ("row_head", ctypes.c_long),
        ("logits", ctypes.c_void_p),
        *((name, ctypes.c_long) for name in ("logit_head", "logit_query")),
        ("scores", ctypes.c_void_p),
        ("score_head", ctypes.c_long),
        ("found", ctypes.c_void_p),
        *(
            (name, ctypes.c_int)
            for name in ("heads", "group", "columns", "tokens", "how", "threads")
        ),
        ("alpha", ctypes.c_float),
    ]


_BINDING = Binding("guesses of logits", omnikv_sizeof_guess=_Guess)


def guesses(
    few: torch.Tensor,
    rows: torch.Tensor,
    logits: torch.Tensor,
    scores: torch.Tensor,
    alpha: float,
    how: str = "max",
    backend: str = "auto",
) -> torch.Tensor:
    """Set scores float32 [Hkv, n] to few . rows less the largest of the query head, as the query
    heads of a K/V head have it together ("max" | "mean").

    few float32 [Hkv, G, r]; rows [Hkv, n, r], floats, a head's without gaps; logits: float32 [Hkv,
    G, n], last dim contiguous as that of scores, whose values are lost. Returns how many of a
    head's scores are above -alpha: int32 [Hkv]. Mutates logits and scores. Raises ValueError for an
    unknown backend.
    """
    native = choose(backend, rows, lambda: _fits(few, rows)) == "native"
    return (_guesses if native else guesses_ref)(few, rows, logits, scores, alpha, how)


def _fits(few: torch.Tensor, rows: torch.Tensor) -> bool:
    known = rows.dtype in FLOATS and few.shape[1] <= GROUP and few.shape[2] <= WIDEST
    return known and _BINDING.usable()


def _guesses(
    few: torch.Tensor,
    rows: torch.Tensor,
    logits: torch.Tensor,
    scores: torch.Tensor,
    alpha: float,
    how: str,
) -> torch.Tensor:
    """By sketch.cpp."""
    (heads, group, columns), few = few.shape, few.contiguous()
    found = torch.empty(heads, dtype=torch.int32)
    assert rows.stride(2) == logits.stride(2) == scores.stride(1) == 1
    assert rows.stride(1) == columns
    call = _Guess(
        few.data_ptr(), rows.data_ptr(), rows.stride(0) * rows.element_size(),
        logits.data_ptr(), *logits.stride()[:2], scores.data_ptr(), scores.stride(0),
        found.data_ptr(), heads, group, columns, rows.shape[1], HOW.index(how),
        torch.get_num_threads(), alpha,
    )  # fmt: skip
    code = loaded().omnikv_guesses(ctypes.byref(call), FLOATS[rows.dtype])
    check(code, f"guesses of logits in {rows.dtype}")
    return found


def guesses_ref(
    few: torch.Tensor,
    rows: torch.Tensor,
    logits: torch.Tensor,
    scores: torch.Tensor,
    alpha: float,
    how: str,
) -> torch.Tensor:
    """`guesses` in plain torch, same arguments and result, in few's dtype."""
    n = rows.shape[1]
    for first in range(0, n, AT_ONCE):
        part = slice(first, min(n, first + AT_ONCE))
        logits[:, :, part] = few @ rows[:, part].to(few.dtype).mT
    if n:
        logits -= logits.amax(-1, keepdim=True)
        scores.copy_(logits.amax(1) if how == "max" else logits.mean(1))
    return (scores > -alpha).sum(1, dtype=torch.int32)


@_BINDING.self_test
def _several() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    for columns in (5, 19, 33):
        few = torch.randn(2, 7, columns, generator=generator)
        rows = torch.randn(2, 131, columns, generator=generator)
        for dtype in FLOATS:
            for how in HOW:
                results = []
                for form in (_guesses, guesses_ref):
                    logits, scores = torch.empty(2, 7, 131), torch.empty(2, 131)
                    form(few, rows.to(dtype), logits, scores, 5.0, how)
                    results.append(scores)
                yield f"guesses of logits in {dtype}", results[0], results[1], torch.float32
