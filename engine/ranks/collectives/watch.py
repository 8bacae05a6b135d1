"""Nobody waits for a card for ever.

A kernel that waits for the rank that is gone has no end of its own, a replayed graph no timeout,
and a thread that waits for the card hears nothing. So another thread looks on: where a rank is lost
and the call does not leave, or where a call stands still for as long as ranks wait for each other,
this process ends with one line. The system then takes the card's work away.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOK = 0.1  # seconds between two looks
LEAVE = 5.0  # seconds in which a call leaves the card once a rank is lost
Ended = Callable[[], bool]


class Watch:
    """Looks on the calls of one rank. moved: a number that grows while a call goes on. mark: puts a
    mark behind the card's work so far, and gives what says whether the card has come to it.
    stalled: called with the seconds that nothing has moved; `lost` follows. end: ends this process
    with a line.
    """

    def __init__(
        self,
        rank: int,
        timeout: float,
        moved: Callable[[], int],
        mark: Callable[[], Ended],
        stalled: Callable[[float], None],
        end: Callable[[str], None] | None = None,
        look: float = LOOK,
        leave: float = LEAVE,
    ) -> None:
        self._rank, self._timeout, self._look, self._leave = rank, timeout, look, leave
        self._moved, self._mark, self._stalled = moved, mark, stalled
        self._end = end or _ended
        self._depth, self._serial, self._lost = 0, 0, ""
        self._since = self._leaves = 0.0
        self._mark_of: tuple[tuple[int, int], float, Ended | None] = ((-1, -1), 0.0, None)
        self._closed = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """A call, in which this rank may wait for a card."""
        self._serial += 1
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self._serial += 1

    def lost(self, why: str) -> None:
        """A rank is lost: the call that runs must leave soon."""
        if not self._lost:
            self._leaves = time.monotonic() + self._leave
            self._lost = why

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(self._look):
            now = time.monotonic()
            if not self._depth:
                continue
            if not self._lost:
                self._see(now)
            elif now > self._leaves:
                self._end(f"rank {self._rank}: {self._lost}; its card waits for what does not come")
                return

    def _see(self, now: float) -> None:
        """Notice a call that stands still while its card does not end what it was given."""
        state, since, ended = (self._serial, self._moved()), self._mark_of[1], self._mark_of[2]
        if state != self._mark_of[0] or (ended is not None and ended()):
            self._mark_of = state, now, None
        elif ended is None and now - since > self._timeout / 2:
            self._mark_of = state, since, self._mark()
        elif ended is not None and now - since > self._timeout:
            self._stalled(now - since)


def _ended(line: str) -> None:
    """End this process, whatever its threads wait for."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
    os._exit(1)
