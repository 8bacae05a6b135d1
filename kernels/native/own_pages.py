"""CPU memory that the system has back as soon as it is freed.

glibc takes a block below its threshold, which grows to 32 MB as larger ones are freed, from one
heap. A hole between two blocks that live stays in the heap, and an aligned block, as torch's are,
does not fit into a hole of its own size (before glibc 2.38). So tensors that are made anew while
the old ones live leave holes of their size: 134 MB as weights of 306 MB were laid elsewhere
(docs/LOG.md, 2026-11-27). Here every tensor has a mapping of its own. Its pages are zeroed by the
system as they are first written, 0.3 ms a MB, so this is for what is made once a layer and chunk,
not for activations. Small ones count: what outlives a chunk and lies between its activations, such
as the positions of a store, splits what they leave.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections.abc import Sequence

import torch

LEAST = 16 << 10  # bytes; of a smaller tensor a mapping costs more than it saves

_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # of every tensor here that lives
_adding = threading.Lock()  # a set that grows cannot be walked over


def empty(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor [*shape] of the dtype and device of `like`, its values undefined:
    in pages of its own on a CPU if it has LEAST bytes, from torch's allocator otherwise.
    """
    return empty_on(shape, like.dtype, like.device)


def empty_on(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    """Return what `empty` does, of this dtype and device."""
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST or torch.device(device).type != "cpu" or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no address space, or too many mappings: torch says it, if it has none either
        return torch.empty(shape, dtype=dtype, device=device)
    with _adding:
        _mapped.add(pages)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


def mapped_bytes() -> int:
    """Return the bytes of all tensors in pages of their own, of this whole process, written to or
    not.
    """
    with _adding:
        return sum(map(len, _mapped))


class Joins:
    """Tensors that are made of others end to end, again and again and in sizes that differ, in
    pages that stay: none of them leaves a hole in the heap, and pages are zeroed once.
    """

    def __init__(self) -> None:
        self._pages: torch.Tensor | None = None

    def joined(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        """Return the pairs [h, n, D] and [h, m, D], each as one contiguous tensor [h, n + m, D].
        Those of the next call overwrite them.
        """
        first = pairs[0][0]
        if first.device.type != "cpu":
            return [torch.cat(pair, 1) for pair in pairs]
        shapes = [(len(a), a.shape[1] + b.shape[1], a.shape[2]) for a, b in pairs]
        sizes = [math.prod(shape) for shape in shapes]
        if self._pages is None or len(self._pages) < sum(sizes) or self._pages.dtype != first.dtype:
            self._pages = None  # before the new ones are made
            self._pages = empty((sum(sizes),), first)
        found = [
            part.view(shape) for part, shape in zip(self._pages[: sum(sizes)].split(sizes), shapes)
        ]
        for mine, (a, b) in zip(found, pairs):
            mine[:, : a.shape[1]], mine[:, a.shape[1] :] = a, b
        return found

    def drop(self) -> None:
        """Give the pages back once nothing made here is used."""
        self._pages = None


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy, in pages of its own where `empty` has them."""
    return empty(tuple(tensor.shape), tensor).copy_(tensor)
