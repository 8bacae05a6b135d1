"""Events of one job on their way from the model's thread into an event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

UNREAD = 256  # events that may wait for their reader before the answer pauses


class Bell:
    """Wakes the readers of one event loop: once for all events that are posted before it gets to
    run. Each call into the loop is a system call, in which the model's thread gives the interpreter
    away and waits to get it back.
    """

    def __init__(self) -> None:
        self._rung: deque[Mailbox] = deque()
        self._called = False

    def ring(self, box: Mailbox, loop: asyncio.AbstractEventLoop) -> None:
        """Wake a mailbox's reader soon; from any thread."""
        self._rung.append(box)
        if not self._called:
            self._called = True
            try:
                loop.call_soon_threadsafe(self._wake)
            except RuntimeError:
                pass  # the event loop has ended: nobody listens

    def _wake(self) -> None:
        self._called = False  # before any is taken: who comes now calls again
        while self._rung:
            self._rung.popleft().wake()


class Mailbox:
    """Made in the event loop, which alone reads it, one reader at a time; any thread may post.
    Nothing stops who posts: `full` says that the reader is behind, until half of it is read.

    asyncio.Queue under asyncio.wait_for would do the same with a task and four more rounds of the
    loop for every token, during which the model's thread waits for the interpreter.
    """

    def __init__(self, bell: Bell | None = None) -> None:
        self._loop, self._bell = asyncio.get_running_loop(), bell or Bell()
        self._events: deque[Any] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._behind = False

    def full(self) -> bool:
        """Whether whoever posts should wait."""
        self._behind = len(self._events) >= (UNREAD // 2 if self._behind else UNREAD)
        return self._behind

    def __len__(self) -> int:
        """Events that nobody has read."""
        return len(self._events)

    def post(self, event: Any) -> None:
        """Leave an event."""
        self._events.append(event)
        self._bell.ring(self, self._loop)

    def wake(self) -> None:
        """Wake the reader. To be called in the event loop."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self, seconds: float | None = None) -> Any:
        """The next event; None where none comes within so many seconds."""
        while not self._events:
            # race: whoever posts from here on wakes after this future is there
            self._reader = self._loop.create_future()
            timer = None if seconds is None else self._loop.call_later(seconds, self.wake)
            try:
                await self._reader
            finally:
                if timer is not None:
                    timer.cancel()
                self._reader = None
            if seconds is not None:
                break
        return self._events.popleft() if self._events else None
