"""The C library's heap, which keeps what was freed."""

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


def give_back() -> bool:
    """Give the system the pages that nothing lies in; whether any were given.

    A prompt's chunks leave 100 MB of them on a model of 160 million parameters, in which
    glibc keeps blocks of up to 32 MB apart. It takes 40 ms, and what is needed again comes
    back page by page.
    """
    trim = _trim()
    return trim is not None and bool(trim(0))
