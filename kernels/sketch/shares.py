"""Which share of a query's attention falls on each chunk of keys by its landmark, their mean: what
ShadowKV (Sun et al., ICML 2025, Algorithm 2) ranks chunks by. By one call of C++ on a CPU, else by
torch's operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import torch

from kernels.launch.dispatch import choose
from kernels.launch.softmax import PLAIN, Softmax
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded

HOW = ("max", "mean", "sum")  # by their numbers in shares.cpp
_REDUCED: dict[str, Callable[..., torch.Tensor]] = dict(
    zip(HOW, (torch.amax, torch.mean, torch.sum))
)
LANES = 16  # a head's dimensions are whole vectors


class _Shares(ctypes.Structure):
    """`Shares` of shares.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "marks")),
        *((name, ctypes.c_long) for name in ("mark_head", "mark_row")),
        ("aside", ctypes.c_void_p),
        ("aside_head", ctypes.c_long),
        ("scores", ctypes.c_void_p),
        ("score_head", ctypes.c_long),
        *(
            (name, ctypes.c_int)
            for name in ("heads", "group", "dim", "count", "held", "how", "threads")
        ),
        *((name, ctypes.c_float) for name in ("scale", "cap")),
    ]


_BINDING = Binding("shares of chunks", omnikv_sizeof_shares=_Shares)


def landmark_shares(
    q: torch.Tensor,
    marks: torch.Tensor,
    aside: torch.Tensor,
    scores: torch.Tensor,
    scale: float,
    softmax: Softmax = PLAIN,
    how: str = "max",
    backend: str = "auto",
) -> None:
    """Set scores float32 [Hkv, n] to the softmax of scale * q . marks over the chunks that are not
    set aside, as the query heads of a K/V head have it together ("max" | "mean" | "sum"); -inf for
    those that are.

    q [H, D]; marks [Hkv, n, D], floats; aside int64 [Hkv, O], each below n; last dims contiguous.
    softmax: its cap is used. Mutates scores. Raises ValueError for an unknown backend, MemoryError
    where the kernel finds no room for its own.
    """
    native = choose(backend, marks, lambda: _fits(marks)) == "native"
    (_shares if native else landmark_shares_ref)(q, marks, aside, scores, scale, softmax, how)


def _fits(marks: torch.Tensor) -> bool:
    return marks.dtype in FLOATS and not marks.shape[2] % LANES and _BINDING.usable()


def _shares(
    q: torch.Tensor,
    marks: torch.Tensor,
    aside: torch.Tensor,
    scores: torch.Tensor,
    scale: float,
    softmax: Softmax,
    how: str,
) -> None:
    """By shares.cpp."""
    (heads, count, dim), size = marks.shape, marks.element_size()
    if not count:
        return
    wide = q.float().contiguous()
    assert aside.dtype == torch.int64 and scores.stride(1) == marks.stride(2) == 1
    assert aside.stride(1) == 1 or aside.shape[1] < 2
    call = _Shares(
        wide.data_ptr(), marks.data_ptr(), marks.stride(0) * size, marks.stride(1) * size,
        aside.data_ptr(), aside.stride(0), scores.data_ptr(), scores.stride(0),
        heads, len(q) // heads, dim, count, aside.shape[1], HOW.index(how),
        torch.get_num_threads(), scale, softmax.cap,
    )  # fmt: skip
    code = loaded().omnikv_shares(ctypes.byref(call), FLOATS[marks.dtype])
    check(code, f"shares of chunks in {marks.dtype}")


def landmark_shares_ref(
    q: torch.Tensor,
    marks: torch.Tensor,
    aside: torch.Tensor,
    scores: torch.Tensor,
    scale: float,
    softmax: Softmax,
    how: str,
) -> None:
    """`landmark_shares` in plain torch, same arguments, in float32 or in q's float64."""
    wide, lowest = torch.promote_types(q.dtype, torch.float32), float("-inf")
    logits = q.to(wide).view(len(marks), -1, q.shape[1]) @ marks.to(wide).mT * scale
    logits = softmax.capped(logits)
    out = aside.unsqueeze(1).expand(-1, logits.shape[1], -1)
    shares = logits.scatter_(2, out, lowest).softmax(-1)
    found = _REDUCED[how](shares, 1)
    scores.copy_(found.scatter_(1, aside, lowest))


@_BINDING.self_test
def _several() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    q, marks = (
        torch.randn(14, 64, generator=generator),
        torch.randn(2, 301, 64, generator=generator),
    )
    aside = torch.stack([torch.randperm(301, generator=generator)[:5] for _ in range(2)])
    for dtype in FLOATS:
        for how in HOW:
            given = q.to(dtype), marks.to(dtype), aside
            found, expected = torch.empty(2, 301), torch.empty(2, 301)
            _shares(*given, found, 0.125, Softmax(20.0), how)
            landmark_shares_ref(*given, expected, 0.125, Softmax(20.0), how)
            yield f"shares of chunks in {dtype}", found.exp(), expected.exp(), torch.float32
