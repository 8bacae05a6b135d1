"""Bounds on the logits of pages from a few channels of their keys' extremes: what RocketKV (Behnam
et al., ICML 2025, section 3) ranks pages by. By one call of C++ on a CPU, else by torch's
operators.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

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


_BINDING = Binding("bounds by channels", omnikv_sizeof_bounds=_Bounds)


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
