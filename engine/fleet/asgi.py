"""Call an ASGI application in this process, without a connection: what a replica does with a
request that another process took.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class Asked:
    """A request that was taken elsewhere, its body whole. beginnings: of its text (prefixes.py)."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    beginnings: tuple[bytes, ...] = ()

    @property
    def scope(self) -> dict[str, Any]:
        """As a server would make it of a connection."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "root_path": "",
            "query_string": self.query,
            "headers": self.headers,
            "server": None,
            "client": None,
        }


@dataclass(frozen=True)
class Begun:
    """The beginning of a reply."""

    status: int
    headers: Headers


async def answered(app: Any, asked: Asked) -> AsyncGenerator[Begun | bytes, None]:
    """The reply of an application: Begun, then parts of its body. Closing the iterator tells the
    application that the client has left. Raises what the application raises before it has begun.
    """
    parts: asyncio.Queue[Begun | bytes | None] = asyncio.Queue(1)  # it waits for who reads
    given, left = False, asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": asked.body, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if left.is_set():
            return
        if message["type"] == "http.response.start":
            await parts.put(Begun(message["status"], list(message["headers"])))
        elif message.get("body"):
            await parts.put(bytes(message["body"]))

    async def run() -> None:
        try:
            await app(asked.scope, receive, send)
        finally:
            if not left.is_set():
                await parts.put(None)

    task = asyncio.ensure_future(run())
    try:
        while (part := await parts.get()) is not None:
            yield part
        await task
    finally:
        left.set()
        while not parts.empty():  # whoever waits to send goes on
            parts.get_nowait()
        if not task.done():
            _leaving.add(task)
            task.add_done_callback(_leaving.discard)


_leaving: set[asyncio.Task[None]] = set()  # an event loop alone does not keep its tasks
