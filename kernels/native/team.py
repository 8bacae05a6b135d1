"""What the team of threads of the C++ kernels did (team.cpp), for tests and for tools/speed."""

from __future__ import annotations

import ctypes

import torch

from kernels.native.library import missing, native

MOST = 256  # threads of a call


def last() -> tuple[list[int], list[int]]:
    """Return (pieces that each thread of the last shared call began with, pieces that it took).
    Both have the same sum; they differ where a thread was held up and others took its pieces.
    """
    begun, taken = (ctypes.c_long * MOST)(), (ctypes.c_long * MOST)()
    threads = _library().omnikv_team_last(begun, taken)
    return begun[:threads], taken[:threads]


def marks(threads: int, count: int, piece: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Share the numbers 0 .. count - 1 in pieces of `piece`: (how often each came, the number of
    the thread that it came to), int32 [count].
    """
    times = torch.zeros(count, dtype=torch.int32)
    by = torch.full((count,), -1, dtype=torch.int32)
    _library().omnikv_team_marks(
        threads,
        ctypes.c_long(count),
        ctypes.c_long(piece),
        ctypes.c_void_p(times.data_ptr()),
        ctypes.c_void_p(by.data_ptr()),
    )
    return times, by


def _library() -> ctypes.CDLL:
    library = native()
    if library is None:
        raise RuntimeError(f"no team of threads: {missing()}")
    return library
