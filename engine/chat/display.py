"""What the chat shows beside the text, all on stderr: progress that tells the truth, one dim line
per turn, errors.
"""

import os
import shutil
import sys
import time

from engine.units import clock, count, human

# seconds before a terminal shows progress: most reads are shorter and would only flicker
PATIENCE = 0.4
EVERY = 5.0  # seconds between progress lines where stderr is no terminal


def resident_bytes() -> int | None:
    """Memory of this process now; None where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


def printable(text: str) -> str:
    """A model's text without control characters, which could write over the screen or answer for
    the user.
    """
    return "".join(
        c if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f") else "\ufffd" for c in text
    )


class Display:
    """Lines on stderr; a terminal gets progress as one line that is written over. NO_COLOR is
    obeyed.
    """

    def __init__(self, stream=None, quiet: bool = False):
        self.stream = stream or sys.stderr
        self.quiet = quiet
        self.tty = self.stream.isatty()
        self.dims = self.tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._width = 0  # characters of the progress line on the screen
        self._next = 0.0  # when the next progress line is due

    def line(self, text: str = "") -> None:
        """One line, or several."""
        self.clear()
        self._write(text + "\n")

    def dim(self, text: str) -> None:
        """A line that steps back behind the text."""
        self.clear()
        self._write(f"\033[2m{text}\033[0m\n" if self.dims else text + "\n")

    def note(self, text: str) -> None:
        """A line that --quiet leaves out."""
        if not self.quiet:
            self.dim(text)

    def clear(self) -> None:
        """Take the progress line off the screen."""
        if self._width:
            self._write("\r" + " " * self._width + "\r")
            self._width = 0

    def progress(self, text: str, started: float, last: bool = False) -> None:
        """Show how far something is. started: time.monotonic() of its beginning. last: it is done,
        and the line goes.
        """
        now = time.monotonic()
        if self.quiet:
            return
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

    def reading(self):
        """A progress callback for a prefill (engine.prefill.PrefillProgress)."""
        started = time.monotonic()
        before = (started, 0)

        def show(p) -> None:
            nonlocal before
            now = time.monotonic()
            rate = (p.done - before[1]) / max(now - before[0], 1e-9)
            before = (now, p.done)
            left = f" · {clock(p.eta)} left" if p.eta is not None else ""
            self.progress(
                f"reading {p.done:,} of {count(p.total)} · {p.work:.0%} of the work · {rate:,.0f} tok/s{left}",
                started,
                p.done >= p.total,
            )

        return show

    def loading(self):
        """A progress callback for weights (weights.checkpoint.LoadProgress)."""
        started = time.monotonic()

        def show(p) -> None:
            speed = p.bytes_done / max(p.seconds, 1e-9)
            done = p.bytes_done >= p.bytes_total
            self.progress(
                f"loading shard {p.shard}/{p.shards} · {p.bytes_done / 1e9:.2f} of {p.bytes_total / 1e9:.2f} GB · "
                f"{speed / 1e9:.2f} GB/s",
                started,
                done,
            )
            if done:
                self.note(
                    f"loaded {human(p.bytes_total)} in {clock(p.seconds)} ({speed / 1e9:.2f} GB/s)"
                )

        return show

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except UnicodeEncodeError:
            self.stream.write(text.encode("ascii", "replace").decode())
            self.stream.flush()
