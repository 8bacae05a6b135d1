"""What the chat shows beside the answer, all on stderr: progress, dim lines of figures, errors."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from engine.base.figures import clock, count, human
from engine.plan.prefill_time import PrefillProgress
from engine.text.boundary import one_line, printable
from weights.checkpoint import LoadProgress

# seconds before a terminal shows progress: most reads are shorter and would only flicker
PATIENCE = 0.4
EVERY = 5.0  # seconds between progress lines where stderr is not a terminal


class Display:
    """Writes lines to `stream` (stderr by default).

    A terminal shows progress in one line that is written over; anything else gets a line every few
    seconds. Obeys NO_COLOR. quiet: write no progress and no notes.
    """

    def __init__(self, stream: TextIO | None = None, quiet: bool = False):
        self.stream = stream or sys.stderr  # None where it is closed
        self.quiet = quiet
        self.tty = self.stream is not None and self.stream.isatty()
        self.dims = self.tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._width = 0  # characters of the progress line on the screen
        self._next = 0.0  # when the next progress line is due

    def line(self, text: str = "") -> None:
        """Write one line, or several."""
        self.clear()
        self._write(printable(text) + "\n")

    def error(self, message: str) -> None:
        """Write an error: one line of bounded length."""
        self.line(f"error: {one_line(message)}")

    def dim(self, text: str) -> None:
        """Write a dim line."""
        self.clear()
        text = printable(text)
        self._write(f"\033[2m{text}\033[0m\n" if self.dims else text + "\n")

    def note(self, text: str) -> None:
        """Write a dim line that --quiet leaves out."""
        if not self.quiet:
            self.dim(text)

    def prompt(self, text: str) -> None:
        """Write a prompt, behind which the cursor stays."""
        self._write(text)

    def clear(self) -> None:
        """Erase the progress line."""
        if self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0

    def progress(self, text: str, started: float, last: bool = False) -> None:
        """Show how far some work is. started: time.monotonic() when it began. last: whether it is
        done, so that the line goes.
        """
        if self.quiet:
            return
        now, text = time.monotonic(), printable(text)
        if not self.tty:
            due = max(self._next, started + EVERY)
            if now >= due and not last:
                self._next = now + EVERY
                self._write(text + "\n")
            return
        if last:
            self.clear()
        elif now - started >= PATIENCE:
            text = text[: max(20, shutil.get_terminal_size().columns - 1)]
            self._write("\r" + text.ljust(self._width))
            self._width = len(text)

    def reading(self) -> Callable[[PrefillProgress], None]:
        """Return a progress callback for a prefill."""
        started = time.monotonic()
        before = (started, 0)

        def show(p: PrefillProgress) -> None:
            nonlocal before
            now = time.monotonic()
            rate = (p.done - before[1]) / max(now - before[0], 1e-9)
            before = (now, p.done)
            left = f" · {clock(p.eta)} left" if p.eta is not None else ""
            self.progress(
                f"reading {p.done:,} of {count(p.total)} · {p.work:.0%} of the work · "
                f"{rate:,.0f} tok/s{left}",
                started,
                p.done >= p.total,
            )

        return show

    def loading(self) -> Callable[[LoadProgress], None]:
        """Return a progress callback for reading weights."""
        started = time.monotonic()

        def show(p: LoadProgress) -> None:
            speed = p.bytes_done / max(p.seconds, 1e-9)
            done = p.bytes_done >= p.bytes_total
            self.progress(
                f"loading shard {p.shard}/{p.shards} · {p.bytes_done / 1e9:.2f} of "
                f"{p.bytes_total / 1e9:.2f} GB · {speed / 1e9:.2f} GB/s",
                started,
                done,
            )
            if done:
                self.note(
                    f"loaded {human(p.bytes_total)} in {clock(p.seconds)} ({speed / 1e9:.2f} GB/s)"
                )

        return show

    def working(self, text: str) -> Callable[[int, int], None]:
        """Return a progress callback (done, total) that writes `text` before the figures."""
        started = time.monotonic()

        def show(done: int, total: int) -> None:
            self.progress(f"{text} {done:,} of {total:,}", started, done >= total)

        return show

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except UnicodeEncodeError:
            self.stream.write(text.encode("ascii", "replace").decode())
            self.stream.flush()
        except (OSError, ValueError, AttributeError):
            pass  # stderr is full, closed or left: there is nobody to tell, and the answer goes on
