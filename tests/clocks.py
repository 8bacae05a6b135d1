"""Clocks that a test holds, or sets for its own thread alone.

`time.monotonic` is one function for the whole process. A test's server runs in another thread, and
its event loop asks the same clock: a loop that has once read a time of a test's far future waits
for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


def set_clock(patch: pytest.MonkeyPatch, name: str, clock: Callable[..., object]) -> None:
    """Let `time.<name>` be `clock` in this thread, until the test ends."""
    real, mine = getattr(time, name), threading.get_ident()

    def asked(*arguments: float) -> object:
        return (clock if threading.get_ident() == mine else real)(*arguments)

    patch.setattr(time, name, asked)


class HeldClock:
    """Stands still, however slow the machine is, or goes on by `step` seconds when it is read."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now

    @contextmanager
    def stepping(self, seconds: float) -> Iterator[None]:
        """Go on by so many seconds at each reading, until the block ends."""
        before, self.step = self.step, seconds
        try:
            yield
        finally:
            self.step = before
