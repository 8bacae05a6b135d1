"""Ctrl-C while the chat works, and the signals that end it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

# SIGHUP: the terminal was closed; SIGTERM: somebody asks the program to end
ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
AGAIN = 0.02  # seconds after which an interrupt that Python swallowed is raised again


class Ended(BaseException):
    """SIGTERM or SIGHUP arrived: leave as after Ctrl-D, with the code that shells report."""

    def __init__(self, number: int):
        super().__init__(number)
        self.exit_code = 128 + number


class Interrupts:
    """A context in which the first Ctrl-C asks the work to stop where nothing is lost.

    A second Ctrl-C raises KeyboardInterrupt at once and sets `leaving`. Inside `at_once` the first
    raises too, for work that has no place to stop at. Contexts nest: the outermost begins and ends.
    """

    def __init__(self) -> None:
        self.stopped = self.leaving = False
        self._depth = self._asking = 0  # contexts entered; those that only ask

    def __enter__(self) -> Interrupts:
        self._begin()
        self._asking += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._asking -= 1
        self._end()

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Raise KeyboardInterrupt at the first Ctrl-C, but for the contexts entered inside."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    def _begin(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self.stopped = self.leaving = False
        # Python lets only the main thread set a handler
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._interrupted)

    def _end(self) -> None:
        self._depth -= 1
        if self._depth == 0 and self._main:
            signal.signal(signal.SIGINT, self._before)

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        if self.stopped:
            self.leaving = True
            raise KeyboardInterrupt
        self.stopped = True
        if not self._asking:
            raise KeyboardInterrupt

    def should_stop(self) -> bool:
        """Return whether Ctrl-C was pressed; the decode loop asks before every step."""
        return self.stopped

    def watched(self, show: Callable[..., None]) -> Callable[..., None]:
        """Wrap a progress callback so that Ctrl-C ends the work after the current part."""

        def progress(*figures: Any) -> None:
            show(*figures)
            if self.stopped:
                raise KeyboardInterrupt

        return progress


@contextlib.contextmanager
def ending() -> Iterator[None]:
    """A context in which SIGTERM and SIGHUP raise Ended, and no interrupt prints a traceback.

    A signal that is ignored (nohup) stays ignored. The second of a kind kills at once.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Ended(number)

    def unraisable(report: Any) -> None:
        # Python runs handlers anywhere, also in a destructor, whose exceptions it only prints.
        if not issubclass(report.exc_type, (KeyboardInterrupt, Ended)):
            sys.__unraisablehook__(report)
        elif isinstance(report.exc_value, Ended):
            number = report.exc_value.exit_code - 128
            threading.Timer(AGAIN, os.kill, (os.getpid(), number)).start()
        else:
            threading.Timer(AGAIN, os.kill, (os.getpid(), signal.SIGINT)).start()

    before = {number: signal.getsignal(number) for number in ENDING}
    taken = [number for number, handler in before.items() if handler == signal.SIG_DFL]
    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for number in taken:
            signal.signal(number, before[number])
