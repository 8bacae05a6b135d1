"""The server's port and its file descriptors, before anything is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from engine.base.errors import EngineError

BACKLOG = 2048  # connections that the system holds until they are accepted
ACCEPTS = 64  # taken in one round of the event loop; asyncio takes as many as it may hold
SPARE = 384  # descriptors for files and for connections that are being refused
MOST_FILES = 1 << 16
NEXT = 20  # ports to try for a free one
QUIET = 60.0  # seconds between two lines about the same


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on all addresses of `host`; port 0: any free one. Raises EngineError
    where that cannot be, in one line.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise EngineError(f"--host {host}: not an address of this machine ({error})") from None
    made: list[socket.socket] = []
    try:
        for family, address in dict.fromkeys((family, address) for family, *_, address in found):
            if port == 0 and made:
                address = (address[0], made[0].getsockname()[1], *address[2:])
            made.append(_bound(family, address))
    except OSError as error:
        for link in made:
            link.close()
        raise _refused(host, port, error) from None
    return made


def _bound(family: int, address: Any) -> socket.socket:
    link = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":  # elsewhere it lets two programs listen on one port
            link.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            link.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        link.bind(address)
        link.listen(BACKLOG)
    except BaseException:
        link.close()
        raise
    return link


def _refused(host: str, port: int, error: OSError) -> EngineError:
    if error.errno != errno.EADDRINUSE:
        return EngineError(f"--host {host} --port {port}: cannot listen there ({error.strerror})")
    for other in range(port + 1, min(port + 1 + NEXT, 65536)):
        with contextlib.suppress(EngineError, OSError):
            family, *_, address = socket.getaddrinfo(host, other, type=socket.SOCK_STREAM)[0]
            _bound(family, address).close()
            return EngineError(f"port {port} is taken: --port {other}")
    return EngineError(f"port {port} is taken: --port N for another")


def places(wanted: int) -> int:
    """How many connections there may be at once: at most `wanted`, and what the system's limit of
    open files leaves, which is raised as far as it goes.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if soft == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(soft // 2, soft - SPARE))


class Once:
    """The event loop's exceptions. A connection that cannot be accepted is said once a minute:
    asyncio says it for each try, 2,048 times a second.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._said = say, float("-inf")

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or "accept" not in context.get("message", ""):
            loop.default_exception_handler(context)
            return
        now = time.monotonic()
        if now - self._said >= QUIET:
            self._said = now
            self._say(f"a connection cannot be accepted: {error.strerror}; ulimit -n allows more")
