"""Ctrl-C before a program has begun: importing torch takes seconds, and its traceback helps nobody.

A program calls `leave_quietly` before it imports anything heavy. Once its own code runs, Ctrl-C is
the KeyboardInterrupt that it always was.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType


def leave_quietly(package: str) -> None:
    """Where this process is `python -m` something of `package`: end with 130 and say nothing at a
    Ctrl-C while modules are imported; print no traceback of a later one that nobody catches.
    """
    command = sys.orig_argv
    at = command.index("-m") + 1 if "-m" in command else len(command)
    mine = at < len(command) and f"{command[at]}.".startswith(f"{package}.")
    if not mine or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
        sys.excepthook = _silent


def _interrupted(number: int, frame: FrameType | None) -> None:
    if _importing(frame):
        os._exit(128 + number)  # libraries would take an exception for a failure of their own
    signal.signal(signal.SIGINT, signal.default_int_handler)
    raise KeyboardInterrupt


def _importing(frame: FrameType | None) -> bool:
    """Whether the main module still imports: it has called nothing but the import system."""
    inner = None
    while frame is not None:
        main = frame.f_globals.get("__name__") == "__main__"
        if main and frame.f_code.co_name == "<module>":
            return inner is None or inner.f_code.co_filename.startswith("<frozen importlib")
        inner, frame = frame, frame.f_back
    return True  # runpy imports the package itself


def _silent(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, where)
