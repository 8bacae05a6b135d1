"""Sums and lists over the processes of one model, by the C++ kernel, through a segment of memory
that all of them have mapped: some microseconds for a token's hidden vector.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from kernels.native.library import Binding, Case, loaded

LINE = 64  # bytes: LINE of ranks.cpp
SUMS = {torch.float32: 0, torch.bfloat16: 1}
LIST = 2
ENDED, LATE = 3, 4


class _Call(ctypes.Structure):
    """`Call` of ranks.cpp."""

    _fields_ = [
        ("segment", ctypes.c_void_p),
        ("slot", ctypes.c_long),
        *((name, ctypes.c_int) for name in ("rank", "ranks", "join")),
        *((name, ctypes.c_void_p) for name in ("own", "out")),
        ("bytes", ctypes.c_long),
        ("serial", ctypes.c_uint64),
        ("patience", ctypes.c_double),
    ]


BINDING = Binding("sums over ranks", omnikv_sizeof_ranks_call=_Call)


def usable() -> bool:
    """Whether the kernel runs on this machine."""
    return BINDING.usable()


def segment_bytes(ranks: int, slot: int) -> int:
    """Bytes of a segment, zero at first, whose ranks leave `slot` bytes at a time."""
    return (ranks + 1) * LINE + 2 * ranks * slot


class Joins:
    """One rank's place in a segment at `address`. slot: bytes, a multiple of LINE. patience:
    seconds that it waits for another. Calls are made by all ranks, in one order.
    """

    def __init__(self, address: int, slot: int, rank: int, ranks: int, patience: float) -> None:
        self._call = _Call(address, slot, rank, ranks, LIST, None, None, 0, 1, patience)
        self._slot, self._ranks = slot, ranks

    def add(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """(the sum of x [...] over ranks, added in float32 in the order of ranks, how it ended: 0,
        ENDED or LATE). x: contiguous, of SUMS.
        """
        out = torch.empty_like(x)
        return out, self._run(x, out, SUMS[x.dtype])

    def listed(self, x: torch.Tensor, out: torch.Tensor) -> int:
        """Write x [...] of every rank to out [ranks, ...], both contiguous; how it ended."""
        return self._run(x, out, LIST)

    def end(self) -> None:
        """Have every rank leave that waits, or will."""
        loaded().omnikv_end_ranks(ctypes.byref(self._call))

    def _run(self, x: torch.Tensor, out: torch.Tensor, join: int) -> int:
        call, size = self._call, x.numel() * x.element_size()
        call.join, call.own, call.out, call.bytes = join, x.data_ptr(), out.data_ptr(), size
        code: int = loaded().omnikv_join_ranks(ctypes.byref(call))
        call.serial += -(-size // self._slot)
        return code


@BINDING.self_test
def _sums() -> Iterator[Case]:
    ranks, slot = 3, 256
    held = torch.zeros(segment_bytes(ranks, slot), dtype=torch.uint8)
    joins = [Joins(held.data_ptr(), slot, rank, ranks, 5.0) for rank in range(ranks)]
    generator = torch.Generator().manual_seed(1)
    with ThreadPoolExecutor(ranks) as pool:
        for dtype in SUMS:
            for count in (1, 64, 301):
                parts = [torch.randn(count, generator=generator).to(dtype) for _ in range(ranks)]
                found = list(pool.map(lambda join, x: join.add(x)[0], joins, parts))
                want = sum(part.float() for part in parts).to(dtype)  # type: ignore[union-attr]
                yield f"sum of {count}", torch.stack(found), want.expand(ranks, -1), dtype
        lists = [torch.empty(ranks, 301) for _ in range(ranks)]
        wide = [part.float() for part in parts]
        list(pool.map(lambda join, x, out: join.listed(x, out), joins, wide, lists))
        yield "list", torch.stack(lists), torch.stack(wide).expand(ranks, -1, -1), torch.float32
