"""What every request must pass before its route: a known host, no foreign page, the key, a body of
bounded size and of JSON.

A page of another site can make a browser send requests to this machine (DNS rebinding, simple POSTs
across origins). The Host header must therefore name this server, an Origin must be its own, and a
body must be declared as JSON, which a browser does not send elsewhere without asking first.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import re
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from engine.serve.errors import ApiError
from engine.serve.texts import SIZE

LOOPBACK = ("localhost", "127.0.0.1", "::1")
OPEN = ("/", "/health", "/readyz", "/livez")  # answer without a key, also while the model is loaded
VERSIONS = ("1.0", "1.1")
BODY_SECONDS = 60.0
STALL_SECONDS = 10.0  # in which at least one byte of a body must come
BODIES = 64 << 20  # bytes of all bodies that are not whole yet
# a name or an IPv6 address in brackets, and a port
NAMED = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::[0-9]{1,5})?")


@dataclass(eq=False)
class _Body:
    """One that is being read, of at most `most` bytes. task: reads it; given_up: to make place for
    others.
    """

    most: int
    task: asyncio.Task[None] | None = None
    data: bytearray = field(default_factory=bytearray)
    given_up: bool = False


class Guard:
    """keys: the accepted API keys; empty: none is asked for. hosts: names of this server; empty:
    any (a key protects it then). most: bytes of a body. bodies: of all that are not whole yet;
    None: BODIES, or two of the largest.
    """

    def __init__(
        self, keys: Collection[str], hosts: Collection[str], most: int, bodies: int | None = None
    ) -> None:
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self.hosts, self.most = frozenset(hosts), most
        self.bodies = max(BODIES, 2 * most) if bodies is None else bodies
        self._reading: dict[_Body, None] = {}  # the oldest first

    def check(self, request: Request, path: str) -> None:
        """Raise ApiError where a request may not pass. path: of the route that the router took, as
        the table of routes spells it; what a request says of its own address decides nothing.
        """
        if request.scope["http_version"] not in VERSIONS:
            raise ApiError(505, f"expected HTTP {' or '.join(VERSIONS)}", code="bad_version")
        host = _host(request.headers.getlist("host"))
        if self.hosts and host not in self.hosts:
            raise ApiError(403, "host: this server does not answer to that name", code="bad_host")
        origin = request.headers.get("origin")
        if origin is not None and _origin(origin) not in (self.hosts or {host}):
            raise ApiError(403, "origin: pages of other sites are not served", code="bad_origin")
        if self._keys and path not in OPEN and not self._known(request):
            raise ApiError(
                401,
                "missing or wrong API key (Authorization: Bearer KEY)",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def owner(self, request: Request) -> bytes:
        """Whose key a request came with, for what must not be mixed; b"" where none is needed."""
        return self._digest(request) if self._keys else b""

    def _known(self, request: Request) -> bool:
        digest = self._digest(request)
        # every key is compared, in constant time: the time tells nothing
        return any([hmac.compare_digest(digest, key) for key in self._keys])

    def _digest(self, request: Request) -> bytes:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            given = request.headers.get("x-api-key", "")
        return hashlib.sha256(given.strip().encode()).digest()

    async def body(self, request: Request, most: int = 0) -> dict[str, Any]:
        """The JSON object of a request. most: bytes, where more than others may have. Raises
        ApiError.
        """
        most = max(most, self.most)
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise ApiError(
                415,
                f"content-type: found {ascii(kind[:80])}, expected application/json; add the "
                "header, with curl -H 'content-type: application/json'",
            )
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared[:20]) > most:
            raise _too_large(most)
        data = await self._whole(request, most)
        request.scope[SIZE] = len(data)
        try:
            found = json.loads(data.decode("utf-8"), parse_constant=_refused)
        except (ValueError, RecursionError):
            raise ApiError(400, "the body is no JSON", code="invalid_json") from None
        if not isinstance(found, dict):
            raise ApiError(400, "the body is no JSON object", code="invalid_json")
        return found

    async def _whole(self, request: Request, most: int) -> bytearray:
        """All bytes of a body. Raises ApiError."""
        body, end = _Body(most), time.monotonic() + BODY_SECONDS
        self._reading[body] = None
        body.task = asyncio.ensure_future(self._read(request, body))
        try:
            while True:
                before = len(body.data)
                done, _ = await asyncio.wait([body.task], timeout=STALL_SECONDS)
                if body.given_up:
                    raise ApiError(
                        429,
                        "the body came too slowly while many others came; try again",
                        code="too_many_bodies",
                        headers={"Retry-After": "5"},
                    )
                if done:
                    body.task.result()
                    return body.data
                if len(body.data) == before or time.monotonic() > end:
                    raise ApiError(408, "the body did not come in time", code="body_timeout")
        except ClientDisconnect:
            raise ApiError(400, "the client left") from None
        finally:
            del self._reading[body]
            body.task.cancel()

    async def _read(self, request: Request, body: _Body) -> None:
        async for part in request.stream():
            body.data += part
            if len(body.data) > body.most:
                raise _too_large(body.most)
            self._make_place(body)

    def _make_place(self, own: _Body) -> None:
        """Give the oldest bodies up while all take too much."""
        held = sum(len(body.data) for body in self._reading)
        for body in list(self._reading):
            if held <= self.bodies:
                return
            if body is not own and body.task is not None and not body.given_up:
                body.given_up = True
                held -= len(body.data)
                body.task.cancel()


def _too_large(most: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most} bytes", code="body_too_large")


def _refused(name: str) -> NoReturn:
    raise ValueError(name)  # NaN and Infinity are no JSON


def _host(values: list[str]) -> str:
    """The name in a Host header, without its port and brackets; "" where there is none. Raises
    ApiError for what is no name and port: it could stand for another address elsewhere.
    """
    if not values or values == [""]:
        return ""
    found = NAMED.fullmatch(values[0]) if len(values) == 1 else None
    if found is None:
        raise ApiError(400, "host: expected name or name:port", "host", "bad_host")
    return (found["v6"] or found["name"]).lower()


def _origin(origin: str) -> str | None:
    """The name of the site that a page comes from; None where that is no site."""
    scheme, slashes, rest = origin.partition("://")
    found = NAMED.fullmatch(rest) if slashes and scheme in ("http", "https") else None
    return (found["v6"] or found["name"]).lower() if found else None
