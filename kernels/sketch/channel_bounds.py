"""Bounds on the logits of pages from a few channels of their keys' extremes: what RocketKV (Behnam
et al., ICML 2025, section 3) ranks pages by. By one call of C++ on a CPU, else by torch's
operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from kernels.launch.dispatch import choose
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded

HOW = ("max", "mean", "sum")  # by their numbers in sketch.cpp
_REDUCED: dict[str, Callable[..., torch.Tensor]] = dict(
    zip(HOW, (torch.amax, torch.mean, torch.sum))
)


class _Bounds(ctypes.Structure):
    """`Bounds` of sketch.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("few", "channels", "low", "high")),
        *((name, ctypes.c_long) for name in ("head", "channel")),
        ("out", ctypes.c_void_p),
        ("out_head", ctypes.c_long),
        *((name, ctypes.c_int) for name in ("heads", "group", "count", "pages", "how", "threads")),
    ]


class _Paged(ctypes.Structure):
    """`Paged` of sketch.cpp."""

    _fields_ = [
        ("bounds", _Bounds),
        *((name, ctypes.c_void_p) for name in ("q", "stayed")),
        ("stayed_head", ctypes.c_long),
        ("chosen", ctypes.c_void_p),
        ("chosen_head", ctypes.c_long),
        *(
            (name, ctypes.c_int)
            for name in ("dim", "page", "kept", "later", "room", "kind", "q_kind")
        ),
    ]


_BINDING = Binding("bounds by channels", omnikv_sizeof_bounds=_Bounds, omnikv_sizeof_paged=_Paged)


@dataclass(frozen=True, eq=False)
class Paged:
    """Pages of one layer, and where its choices go: the same tensors in every step.

    low, high [B, Hkv, D, N], floats of equal strides, last dims contiguous: as in `channel_bounds`,
    with its `count` and `how`; bounds float32 [B * Hkv, N], contiguous, takes them. page: rows of a
    page. stayed int32 [B, Hkv, S]: where the first rows of pages stand. chosen int32 [B, Hkv, K]
    takes where the rows of a choice stand. Last dims contiguous.
    """

    low: torch.Tensor
    high: torch.Tensor
    bounds: torch.Tensor
    stayed: torch.Tensor
    chosen: torch.Tensor
    page: int
    count: int
    how: str
    # of each sequence what the C++ kernel is told
    calls: list[Any] = field(default_factory=list, init=False)


class Span(NamedTuple):
    """A sequence's pages: how many; how many of their rows stand where `stayed` says; each of those
    behind stands at its number + later.
    """

    pages: int
    kept: int
    later: int


def choose_pages(
    by: Paged, q: torch.Tensor, spans: Sequence[Span], room: int, backend: str = "auto"
) -> bool:
    """Choose the `room` pages of each head whose bounds are largest, as `select_topk` does, or all
    where there are fewer: by.chosen takes the rows of their pages, ascending; what is behind them
    stays.

    q [B, H, D] floats. Returns whether the C++ kernel runs here and takes these; if not, nothing
    has changed. Mutates by.chosen and by.bounds. Raises ValueError for an unknown backend,
    MemoryError where the kernel finds no room for its own.
    """
    fits = by.low.dtype in FLOATS and q.dtype in FLOATS
    if choose(backend, by.low, lambda: fits and _BINDING.usable()) != "native":
        return False
    _choose(by, q, spans, room)
    return True


def _choose(by: Paged, q: torch.Tensor, spans: Sequence[Span], room: int) -> None:
    """By sketch.cpp."""
    q, queries, lies = q.contiguous(), q.shape[1], q[0].numel() * q.element_size()
    for b in range(len(by.calls), len(q)):
        by.calls.append(_told(by, queries, b))
    for b, (pages, kept, later) in enumerate(spans):
        call = by.calls[b]
        call.bounds.pages, call.bounds.threads = pages, torch.get_num_threads()
        call.q, call.q_kind = q.data_ptr() + b * lies, FLOATS[q.dtype]
        call.kept, call.later, call.room = kept, later, min(room, pages)
        check(loaded().omnikv_choose_bounded(ctypes.byref(call)), "a choice of pages")


def _told(by: Paged, queries: int, b: int) -> _Paged:
    """What the kernel is told of sequence b in every step."""
    low, high, stayed, chosen = by.low[b], by.high[b], by.stayed[b], by.chosen[b]
    heads, dim, _ = low.shape
    size, out = low.element_size(), by.bounds[b * heads :]
    assert low.stride() == high.stride() and low.stride(2) == chosen.stride(1) == 1
    assert out.stride(1) == 1 and (stayed.stride(1) == 1 or stayed.shape[1] < 2)
    bounds = _Bounds(
        None, None, low.data_ptr(), high.data_ptr(), low.stride(0) * size, low.stride(1) * size,
        out.data_ptr(), out.stride(0), heads, queries // heads, by.count, 0, HOW.index(by.how), 1,
    )  # fmt: skip
    return _Paged(
        bounds, None, stayed.data_ptr(), stayed.stride(0), chosen.data_ptr(), chosen.stride(0),
        dim, by.page, kind=FLOATS[low.dtype],
    )  # fmt: skip


def channel_bounds(
    q: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    count: int,
    out: torch.Tensor,
    how: str = "sum",
    backend: str = "auto",
) -> None:
    """Set out float32 [Hkv, n] to the part of a bound on q . k that a K/V head's `count` channels
    give, as its query heads have it together ("max" | "mean" | "sum"): channels in which they are
    largest together, by the sum of their |q|.

    q float32 [Hkv, G, D]; low, high [Hkv, D, n], floats of equal strides: the extremes of each
    channel in each page; last dims contiguous. Mutates out. Raises ValueError for an unknown
    backend.
    """
    channels = q.abs().sum(1).topk(count, -1).indices  # [Hkv, count]
    few = q.gather(2, channels.unsqueeze(1).expand(-1, q.shape[1], -1))
    native = choose(backend, low, lambda: low.dtype in FLOATS and _BINDING.usable()) == "native"
    (_bounds if native else channel_bounds_ref)(few, channels, low, high, out, how)


def _bounds(
    few: torch.Tensor,
    channels: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    out: torch.Tensor,
    how: str,
) -> None:
    """By sketch.cpp."""
    (heads, group, count), size = few.shape, low.element_size()
    few, channels = few.contiguous(), channels.contiguous()
    assert low.stride() == high.stride() and low.stride(2) == out.stride(1) == 1
    call = _Bounds(
        few.data_ptr(), channels.data_ptr(), low.data_ptr(), high.data_ptr(),
        low.stride(0) * size, low.stride(1) * size, out.data_ptr(), out.stride(0),
        heads, group, count, low.shape[2], HOW.index(how), torch.get_num_threads(),
    )  # fmt: skip
    code = loaded().omnikv_channel_bounds(ctypes.byref(call), FLOATS[low.dtype])
    check(code, f"bounds by channels in {low.dtype}")


def channel_bounds_ref(
    few: torch.Tensor,
    channels: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    out: torch.Tensor,
    how: str,
) -> None:
    """In plain torch and few's dtype. few [Hkv, G, count]: of q, the channels that were chosen."""
    head = torch.arange(len(few), device=few.device).unsqueeze(1)
    least, most = (side[head, channels].to(few.dtype) for side in (low, high))
    found = few.clamp(min=0) @ most + few.clamp(max=0) @ least
    out.copy_(_REDUCED[how](found, 1))


@_BINDING.self_test
def _several() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    few = torch.randn(2, 7, 9, generator=generator)
    low, high = torch.randn(2, 2, 40, 51, generator=generator)
    channels = torch.stack([torch.arange(9), torch.arange(39, 3, -4)])
    for dtype in FLOATS:
        for how in HOW:
            found, expected = torch.empty(2, 2, 51)
            given = few, channels, low.to(dtype), high.to(dtype)
            _bounds(*given, found, how)
            channel_bounds_ref(*given, expected, how)
            yield f"bounds by channels in {dtype}", found, expected, torch.float32


@_BINDING.self_test
def _chosen() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    q, (low, high) = (
        torch.randn(1, 6, 40, generator=generator),
        torch.randn(2, 1, 2, 40, 51, generator=generator),
    )
    stayed = torch.arange(2 * 64, dtype=torch.int32).view(1, 2, 64) * 2
    for dtype in FLOATS:
        bounds, chosen = torch.empty(2, 51), torch.full((1, 2, 28), -9, dtype=torch.int32)
        sides = low.to(dtype), high.to(dtype)
        by = Paged(*sides, bounds, stayed, chosen, 4, 9, "sum")
        _choose(by, q.to(dtype), [Span(49, 40, 900)], 7)
        expected = torch.empty(2, 49)
        given = sides[0][0, :, :, :49], sides[1][0, :, :, :49], 9, expected
        channel_bounds(q[0].to(dtype).float().view(2, 3, 40), *given, backend="cpu")
        yield f"bounds by the largest channels in {dtype}", bounds[:, :49], expected, torch.float32
        pages = bounds[:, :49].sort(descending=True, stable=True).indices[:, :7].sort().values
        rows = (pages.unsqueeze(2) * 4 + torch.arange(4)).flatten(1)
        where = torch.where(rows < 40, stayed[0].gather(1, rows.clamp(max=39)), rows + 900)
        yield f"a choice of pages in {dtype}", chosen[0], where.int(), torch.int32
