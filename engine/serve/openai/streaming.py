"""The lines of a streamed answer (server-sent events)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Protocol

from engine.batch.worker import Ended, Reading
from engine.serve.errors import ApiError
from engine.serve.openai.replies import Line
from engine.serve.service import client_error
from engine.serve.worker.worker import Wrote


class Shape(Protocol):
    """How an interface writes an answer: replies.py, anthropic_reply.py, responses_reply.py."""

    def found(self, tokens: int) -> None: ...
    def count(self, event: Wrote) -> None: ...
    def whole(self, events: Iterable[Wrote], choices: int) -> dict[str, Any]: ...
    def begin(self) -> list[Line]: ...
    def quiet(self) -> list[Line]: ...
    def step(self, event: Wrote) -> list[Line]: ...
    def end(self) -> list[Line]: ...
    def failed(self, error: ApiError) -> Line: ...


async def stream(
    events: AsyncIterator[Any],
    reply: Shape,
    ping: Callable[[], float],
    clock: Callable[[], float],
) -> AsyncIterator[str]:
    """The text of a streamed answer. While the prompt is read or waits, comments say how far it is,
    so that neither client nor proxy gives up, and the event that the interface has for that.
    ping: seconds between two of them, now; clock: seconds that pass.
    """
    begun = False
    said, where = clock(), "waiting"
    async for event in events:
        now, lines = clock(), list[Line]()
        if isinstance(event, Reading):
            reply.found(event.cached)
            where = f"reading {event.done}/{event.total}"
            if event.left is not None:
                where += f", {event.left:.1f} s left"
            if not begun:
                begun, lines = True, reply.begin()
        if isinstance(event, Wrote):
            reply.count(event)
            lines = reply.step(event)
            said = now
        elif isinstance(event, Ended):
            lines = reply.end()
            if event.error is not None:
                lines = [reply.failed(client_error(event.error))]
        elif now - said >= ping():
            said = now
            lines += reply.quiet() if begun else []
            yield f": {where}\n\n"
        for line in lines:
            yield written(line)


def written(line: Line) -> str:
    """One event as text."""
    name, value = line
    data = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return (f"event: {name}\n" if name else "") + f"data: {data}\n\n"
