"""Clocks that a test sets: for its own thread alone.

`time.monotonic` is one function for the whole process. A test's server runs in another thread, and
its event loop asks the same clock: a loop that has once read a time of a test's far future waits
for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest


def set_clock(patch: pytest.MonkeyPatch, name: str, clock: Callable[..., object]) -> None:
    """Let `time.<name>` be `clock` in this thread, until the test ends."""
    real, mine = getattr(time, name), threading.get_ident()

    def asked(*arguments: float) -> object:
        return (clock if threading.get_ident() == mine else real)(*arguments)

    patch.setattr(time, name, asked)
