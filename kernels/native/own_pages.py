"""CPU memory that the system has back as soon as it is freed.

glibc takes a block below its threshold, which grows to 32 MB as larger ones are freed, from one
heap. A hole between two blocks that live stays in the heap, and an aligned block, as torch's are,
does not fit into a hole of its own size (before glibc 2.38). So tensors that are made anew while
the old ones live leave holes of their size: 134 MB as weights of 306 MB were laid elsewhere
(docs/LOG.md, 2026-11-27). Here every tensor has a mapping of its own. Its pages are zeroed by the
system as they are first written, 0.3 ms a MB, so this is for what is made once a layer and chunk,
not for activations.
"""

from __future__ import annotations

import math
import mmap

import torch

LEAST = 128 << 10  # bytes; of a smaller tensor a mapping costs more than it saves


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
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy, in pages of its own where `empty` has them."""
    return empty(tuple(tensor.shape), tensor).copy_(tensor)
