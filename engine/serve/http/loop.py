"""uvicorn's server with sockets of our own, told of a signal at once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence

import uvicorn

from engine.serve.http.listening import BACKLOG, Once

TICK = 1.0  # seconds between two looks at whether to end, and of the Date header


class Server(uvicorn.Server):
    """links: sockets that listen. ending: called at each signal to end; it calls `leave` when no
    answer is under way any more. Until then the server listens, so that what comes meanwhile is
    told where it stands; a second signal ends it at once. say: writes a line.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        links: Sequence[socket.socket],
        ending: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        super().__init__(config)
        self._links, self._ending, self._say = links, ending, say
        self._signalled = False

    async def main_loop(self) -> None:
        """As uvicorn's, which looks ten times a second whether to end: once, and when told."""
        self.told, self.loop = asyncio.Event(), asyncio.get_running_loop()
        self.loop.set_exception_handler(Once(self._say))
        for link in self._links:
            link.listen(BACKLOG)  # uvicorn has set it to what is accepted at once
        while not await self.on_tick(0):  # 0: the second in which it renews the Date header
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.told.wait(), TICK)

    def handle_exit(self, sig: int, frame: object) -> None:
        """At a signal. uvicorn's own raises it again at the end, which set the exit code."""
        again, self._signalled = self._signalled, True
        if again or not hasattr(self, "told"):
            self.force_exit = again
            self.leave()
        self._ending()

    def leave(self) -> None:
        """Close the sockets and wait for the connections, as uvicorn does; from any thread."""
        self.should_exit = True
        if hasattr(self, "told"):
            self.loop.call_soon_threadsafe(self.told.set)
