"""What the chat shows beside the answer, all on stderr: lines, and the progress of model work."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.base.figures import clock, count, human
from engine.plan.prefill_time import PrefillProgress
from engine.terminal.lines import Lines
from weights.checkpoint import LoadProgress


class Display(Lines):
    """Lines that know how a prompt is read and weights are loaded."""

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
                f"loading file {p.shard} of {p.shards} · {human(p.bytes_done)} of "
                f"{human(p.bytes_total)} · {human(speed)}/s",
                started,
                done,
            )
            if done:
                self.note(f"loaded {human(p.bytes_total)} in {clock(p.seconds)} ({human(speed)}/s)")

        return show
