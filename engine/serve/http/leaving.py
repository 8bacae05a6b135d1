"""Whether the client of a request is still there."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.requests import Request

# in a request's scope: when its client closed its sending side, by the event loop's clock
HALF = "omnikv.half_closed"
PROBE = 0.1  # seconds after which the system knows whether such a client has gone


async def left(request: Request) -> bool:
    """Whether the client has gone. One that has closed its sending side is waited for until that
    is known.
    """
    half: float | None = request.scope.get(HALF)
    if half is not None:
        await asyncio.sleep(max(0.0, half + 2 * PROBE - asyncio.get_running_loop().time()))
    return await request.is_disconnected()
