"""Signals that wait while all ranks make a call together: one that stopped rank 0 in the middle
would leave the others waiting.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

HELD = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)


class Deferred:
    """A context in which a signal is kept, and handled where the call says so (`now`) or at its
    end. A second one of a kind is handled at once.
    """

    def __enter__(self) -> Deferred:
        self._kept: list[tuple[int, FrameType | None]] = []
        self._before: dict[int, Any] = {}
        # Python lets only the main thread set a handler, and runs handlers there
        if threading.current_thread() is threading.main_thread():
            for number in HELD:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._before[number] = handler
                    signal.signal(number, self._keep)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if error[0] is None:
            self.now()

    def _keep(self, number: int, frame: FrameType | None) -> None:
        again = any(kept == number for kept, _ in self._kept)
        self._kept.append((number, frame))
        if again:
            self.now()

    def now(self) -> None:
        """Handle what has come."""
        kept, self._kept = self._kept, []
        for number, frame in kept:
            self._before[number](number, frame)
