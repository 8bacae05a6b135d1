"""Ctrl-C while the chat reads or writes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.prefill_eta import PrefillProgress


class Interrupts:
    """A context in which the first Ctrl-C asks the work to stop where nothing is lost.

    A second Ctrl-C raises KeyboardInterrupt at once and sets `leaving`.
    """

    def __init__(self) -> None:
        self.stopped = self.leaving = False

    def __enter__(self) -> Interrupts:
        self.stopped = self.leaving = False
        # Python lets only the main thread set a handler
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *error: object) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            self.leaving = True
            raise KeyboardInterrupt
        self.stopped = True

    def should_stop(self) -> bool:
        """Return whether Ctrl-C was pressed; the decode loop asks before every step."""
        return self.stopped

    def watched(self, show: Callable[[PrefillProgress], None]) -> Callable[[PrefillProgress], None]:
        """Wrap a progress callback so that it ends the prefill after the chunk of a Ctrl-C."""

        def progress(p: PrefillProgress) -> None:
            show(p)
            if self.stopped:
                raise KeyboardInterrupt

        return progress
