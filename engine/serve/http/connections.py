"""What one TCP connection may take: so long for a request's headers, so long without reading what
is written to it, and one of a bounded number of places.

uvicorn bounds none of these: a connection that sends nothing, half a header, or never reads would
stay as long as it likes, and as many of them as there are file descriptors stop the server.
"""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.serve.http.leaving import HALF, PROBE

LOOK = 1.0  # seconds between two looks at all connections
FEW = 16 << 10  # bytes of those that wait which a client must take in write_seconds
SEND_BUFFER = (
    256 << 10
)  # bytes that the system holds for one client; it takes up to 4 MB of its own
PROBES = 5.0  # seconds between two of them
FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 5\r\n"
    b"Connection: close\r\n\r\n"
)


@dataclass(frozen=True)
class Limits:
    """connections: held at once. header_seconds: from a connection's begin, or the end of an
    answer, to the end of a request's headers. write_seconds: within which a client must take FEW
    bytes of what waits for it.
    """

    connections: int = 1000
    header_seconds: float = 10.0
    write_seconds: float = 30.0


class Watch:
    """All connections of one server. waiting: those that owe a request, the longest first, and
    since when.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: dict[Connection, float] = {}
        self.held: set[Connection] = set()
        self._looks = False

    def admit(self, new: Connection) -> bool:
        """Take a connection in. Where there are too many, the one that has owed a request for the
        longest makes place; False where none owes any.
        """
        while len(self.held) >= self.limits.connections:
            oldest = next(iter(self.waiting), None)
            if oldest is None:
                return False
            oldest.cut()
        self.held.add(new)
        if not self._looks:
            self._looks = True
            new.loop.call_later(LOOK, self._look, new.loop)
        return True

    def forget(self, gone: Connection) -> None:
        """Drop a connection that has ended."""
        self.held.discard(gone)
        self.waiting.pop(gone, None)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        for late in list(self.waiting):
            if now - self.waiting[late] < self.limits.header_seconds:
                break
            late.late()
        for connection in list(self.held):
            connection.look(now)
        self._looks = bool(self.held)
        if self._looks:
            loop.call_later(LOOK, self._look, loop)


def bounded(limits: Limits) -> type[H11Protocol]:
    """The protocol of one server, for uvicorn's setting `http`."""
    return type("Bounded", (Connection,), {"watch": Watch(limits)})


class Connection(H11Protocol):
    """One connection."""

    watch: Watch

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there."""
        super().connection_made(transport)  # type: ignore[arg-type]
        self._taken = (self.loop.time(), 0)  # when it last took enough, and what waited then
        self._probed = 0.0
        if not self.watch.admit(self):
            self.transport.write(FULL)
            self.transport.close()
            return
        link = transport.get_extra_info("socket")
        if link is not None:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self._owes(True)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self.watch.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes came; a request may begin with them."""
        super().data_received(data)
        self._owes(not self._busy)

    def on_response_complete(self) -> None:
        """An answer was written; the next request may have come already."""
        super().on_response_complete()
        self.watch.waiting.pop(self, None)
        self._owes(not self._busy)

    @property
    def _busy(self) -> bool:
        """Whether a request is being read or answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def _owes(self, owes: bool) -> None:
        """Whether the client is to send a request now. What it sends of one prolongs nothing."""
        waiting = self.watch.waiting
        if not owes or self.transport.is_closing():
            waiting.pop(self, None)
        elif self not in waiting:
            waiting[self] = self.loop.time()

    def late(self) -> None:
        """No whole headers came in time."""
        self.watch.waiting.pop(self, None)
        self.transport.close()

    def cut(self) -> None:
        """End at once, whatever is still to be written."""
        self.watch.forget(self)
        self.transport.abort()

    def look(self, now: float) -> None:
        """End where the client takes nothing of what waits for it, or has gone."""
        unsent = self.transport.get_write_buffer_size()
        stuck = unsent > 0 and (self.flow.write_paused or self.transport.is_closing())
        since, before = self._taken
        if not stuck or unsent <= before - FEW or not before:
            self._taken = (now, unsent if stuck else 0)
        elif now - since >= self.watch.limits.write_seconds:
            self.cut()
            return
        if self._half and now - self._probed >= PROBES:
            self._probe()

    # ---------------------------------------------------------------- half-closed

    @property
    def _half(self) -> bool:
        return self._busy and HALF in self.scope

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client will send nothing more: it has gone, or waits for its answer. Which of the
        two is known after something was written to it: a system answers for who has gone.
        """
        if not self._busy or self.cycle.more_body or self.scope["http_version"] != "1.1":
            return None  # the transport closes
        cast("dict[str, Any]", self.scope)[HALF] = self.loop.time()
        self.cycle.keep_alive = False
        self._probe()
        return True

    def _probe(self) -> None:
        """Write what means nothing. Streams do so themselves (engine/serve/app.py)."""
        self._probed = self.loop.time()
        if not self.cycle.response_started:
            note = h11.InformationalResponse(status_code=102, headers=[], reason=b"Processing")
            self.transport.write(self.conn.send(note) or b"")
        self.loop.call_later(PROBE, self._reset)

    def _reset(self) -> None:
        """End where the system has learnt that the client is not there."""
        link = self.transport.get_extra_info("socket")
        if self._half and link is not None and not self.transport.is_closing():
            if link.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                self.cut()
