"""The C library's heap, which keeps what was freed."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """glibc's malloc_trim; None where the C library has none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return None


@functools.cache
def _asked() -> Callable[[], _Heap] | None:
    """glibc's mallinfo2, of 2.33 or newer; None where the C library has none."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return None
    ask.restype = _Heap
    return ask


class _Heap(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def free_in_heap() -> int:
    """Bytes of the heap that nothing lies in, resident or given back; 0 where it is not known."""
    ask = _asked()
    return 0 if ask is None else int(ask().fordblks)


def used_of_heap() -> int:
    """Bytes that live in the heap and in the mappings of blocks too large for it; 0 where it is not
    known.
    """
    ask = _asked()
    if ask is None:
        return 0
    found = ask()
    return int(found.uordblks) + int(found.hblkhd)


def give_back() -> bool:
    """Give the system the pages that nothing lies in; whether any were given.

    A prompt's chunks leave 100 MB of them on a model of 160 million parameters, in which
    glibc keeps blocks of up to 32 MB apart. It takes 3 to 40 ms, and what is needed again comes
    back page by page, 20 ms for 80 MB.
    """
    trim = _trim()
    return trim is not None and bool(trim(0))
