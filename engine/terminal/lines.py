"""Lines on stderr: notes, dim figures, errors, and progress that is written over."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from engine.text.boundary import one_line, printable

# seconds before a terminal shows progress: most reads are shorter and would only flicker
PATIENCE = 0.4
EVERY = 5.0  # seconds between progress lines where stderr is not a terminal
REDRAW = 0.1  # seconds between them on a terminal: figures that change faster cannot be read


class Lines:
    """Writes lines to `stream` (stderr by default).

    A terminal shows progress in one line that is written over; anything else gets a line every few
    seconds. Obeys NO_COLOR. quiet: write no progress and no notes.
    """

    def __init__(self, stream: TextIO | None = None, quiet: bool = False):
        self.stream = stream or sys.stderr  # None where it is closed
        self.quiet = quiet
        self.tty = self.stream is not None and self.stream.isatty()
        self.dims = self.tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._shown = ""  # the progress line on the screen
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
        if self._shown:
            self._write("\r" + " " * len(self._shown) + "\r")
            self._shown = ""

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
        elif now >= max(self._next, started + PATIENCE):
            text = text[: max(20, shutil.get_terminal_size().columns - 1)]
            if self._shown != text:
                self._next = now + REDRAW
                self._write("\r" + text.ljust(len(self._shown)))
                self._shown = text

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
