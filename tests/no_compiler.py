"""A machine without a C++ compiler, for as long as a test wants one."""

from collections.abc import Iterator
from contextlib import contextmanager

from kernels.native import library


@contextmanager
def no_compiler() -> Iterator[None]:
    """Take the C++ kernels away from the whole process: what is made inside runs on torch's
    operators. A model that was loaded before keeps its own.
    """
    held = library._library, library._reason
    library._library, library._reason = None, "no C++ compiler (a test)"
    try:
        yield
    finally:
        library._library, library._reason = held
