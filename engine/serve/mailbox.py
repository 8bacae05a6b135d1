"""Events of one job on their way from the model's thread into the event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.serve.worker import Event


class Mailbox:
    """Made in the event loop, which alone reads it, one reader at a time; any thread may post.

    asyncio.Queue under asyncio.wait_for would do the same with a task and four more rounds of the
    loop for every token, during which the model's thread waits for the interpreter.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[Event] = deque()
        self._reader: asyncio.Future[None] | None = None

    def post(self, event: Event) -> None:
        """Leave an event."""
        self._events.append(event)
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            pass  # the event loop has ended: nobody listens

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self, seconds: float) -> Event | None:
        """The next event; None where none comes within so many seconds."""
        if not self._events:
            # race: whoever posts from here on wakes after this future is there
            self._reader = self._loop.create_future()
            timer = self._loop.call_later(seconds, self._wake)
            try:
                await self._reader
            finally:
                timer.cancel()
                self._reader = None
        return self._events.popleft() if self._events else None
