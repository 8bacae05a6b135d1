"""An interrupt at a counted line of the engine: at any moment, and at the same one again.

Counted over all lines it comes where the time is spent. Counted over the lines of one place it
comes where state changes, which takes few lines.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

ENGINE = str(Path(__file__).resolve().parents[3] / "engine")
# `with lock:` there: between taking a lock and the body a signal never comes, a traced line does
LOCKED = str(Path(ENGINE, "bank", "pool", "host_pool.py"))
# parts of the names of the files of a place
PLACES = (
    ("/runner/state.py", "/runner/prefill.py", "/runner/step.py", "/runner/extend.py"),
    ("/runner/history.py", "/runner/prompt.py", "/runner/rewind.py"),
    ("/session/", "/query_ring.py", "/runner/rollback.py"),
    ("/methods/",),
    ("/bank/",),
)


class Interrupt(KeyboardInterrupt):
    """A Ctrl-C of this test."""


class Countdown:
    """Raises Interrupt when so many lines of the engine have run. place: one of PLACES, or () for
    all of it. hit: whether it has.
    """

    def __init__(self, lines: int, place: tuple[str, ...] = ()) -> None:
        self.left, self.place, self.hit = lines, place or ("/",), False

    def __call__(self, frame, event, argument):
        """Trace a call: lines of the engine count, other files run untraced."""
        file = frame.f_code.co_filename
        counts = file.startswith(ENGINE) and file != LOCKED
        return self.line if counts and any(part in file for part in self.place) else None

    def line(self, frame, event, argument):
        """Count a line; the last one raises."""
        if event == "line":
            self.left -= 1
            if self.left <= 0 and not self.hit:
                self.hit = True
                sys.settrace(None)
                raise Interrupt(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return self.line


@contextlib.contextmanager
def interrupted_after(lines: int | None, place: tuple[str, ...] = ()) -> Iterator[Countdown]:
    """Raise Interrupt after so many lines of the engine inside (None: never), in this thread."""
    countdown = Countdown(lines or 0, place)
    if lines is None:
        yield countdown
        return
    before = sys.gettrace()
    sys.settrace(countdown)
    try:
        yield countdown
    finally:
        sys.settrace(before)
