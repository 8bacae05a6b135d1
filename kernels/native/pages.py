"""Memory in large pages, for weights, which a decode step reads whole.

A thread that streams through pages of 4 KB waits for their addresses: one row's product by weights
of 2 to 17 MB ran at 14 to 15 GB/s in them and at 21 to 25 GB/s in pages of 2 MB (an EPYC with
AVX512, docs/LOG.md, 2026-11-24). Linux gives large pages to memory that asks, where
/sys/kernel/mm/transparent_hugepage/enabled says `madvise`, and torch's allocations do not ask.
Tensors lie here one after the other, so that small ones share pages too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import threading
import weakref

import torch

PAGE = 2 << 20  # x86's, and ARM's with pages of 4 KB below
BLOCK = 64 << 20  # bytes of address space that are taken at a time; resident are those written
LEAST = 64 << 10  # a smaller tensor stays with torch's allocator
ALIGN = 64  # a cache line
_COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1: pages that were written already become a large one

_lock = threading.Lock()


class _Block:
    """A mapping of fresh pages, all zeros, of which tensors take parts until it is full. It lives
    as long as the longest of them.
    """

    def __init__(self, size: int) -> None:
        """Map `size` bytes from a page's beginning on. Raises OSError where nothing is left."""
        pages = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without large pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        view = memoryview(pages)
        self._view = weakref.ref(view)
        address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
        self._at = -address % PAGE
        self._stop = self._at + size
        self.first: memoryview | None = view  # until the first tensor holds it

    def take(self, size: int) -> torch.Tensor | None:
        """Return uint8 [size] of zeros; None where the rest is smaller, or the mapping is gone."""
        view = self._view()
        if view is None or self._at + size > self._stop:
            return None
        memory = torch.frombuffer(view, dtype=torch.uint8, count=size, offset=self._at)
        self._at += -(-size // ALIGN) * ALIGN
        self.first = None
        return memory


_current: _Block | None = None


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Make a tensor of zeros [*shape] on the CPU, in large pages where the system has them and the
    tensor has LEAST bytes.
    """
    global _current
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(*shape, dtype=dtype)
    with _lock:
        memory = _current.take(size) if _current is not None else None
        if memory is None:
            try:
                block = _Block(max(size, BLOCK))
            except OSError:
                return torch.zeros(*shape, dtype=dtype)
            memory = block.take(size)
            assert memory is not None
            if size < BLOCK:
                _current = block
    return memory.view(dtype).view(shape)


def moved(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a CPU tensor in large pages, or the tensor where it is too small
    for them.
    """
    if tensor.nbytes < LEAST or not hasattr(mmap, "MADV_HUGEPAGE"):
        return tensor
    return zeros(*tensor.shape, dtype=tensor.dtype).copy_(tensor)


def enlarge(rows: torch.Tensor, written: int) -> None:
    """Ask for large pages for contiguous rows [.., heads, T, width] on a CPU. The first `written`
    of every head, which are there, are joined where the system can; the others come in large
    pages. Nothing happens where there are none.
    """
    advise = _advise()
    whole = range(-(-rows.data_ptr() // PAGE), (rows.data_ptr() + rows.nbytes) // PAGE)
    if advise is None or rows.device.type != "cpu" or not whole:
        return
    advise(whole.start * PAGE, len(whole) * PAGE, mmap.MADV_HUGEPAGE)
    row = rows.shape[-1] * rows.element_size()
    for head in range(rows.nbytes // (rows.shape[-2] * row)):
        at = rows.data_ptr() + head * rows.shape[-2] * row
        for page in range(at // PAGE, -(-(at + written * row) // PAGE)):
            if page in whole:
                advise(page * PAGE, PAGE, _COLLAPSE)  # the first without a page ends a longer call


@functools.cache
def _advise() -> ctypes._NamedFuncPointer | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise
