"""Calls about texts, beside the event loop: bounded, the shortest first, dropped when their client
has gone.

Tokenizing a megabyte takes a second. Short texts have a thread of their own, so that nobody waits
for a long one who has not sent one.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from engine.serve.errors import ApiError

SIZE = "omnikv.size"  # in a request's scope: bytes of its body
SHORT = 16 << 10  # bytes of a body
MOST_SHORT = 1024  # calls that may wait
LOOK = 0.1  # seconds between two looks at whether the client is still there


class _Line:
    """One thread and the calls that wait for it."""

    def __init__(self, name: str, most: int) -> None:
        self.most = most
        self._pool = ThreadPoolExecutor(1, name)
        self._heap: list[tuple[int, int, Future[Any], Callable[[], Any]]] = []
        self._numbers, self._lock = itertools.count(), threading.Lock()

    def submit(self, size: int, call: Callable[[], Any]) -> Future[Any]:
        """Queue a call. Raises ApiError where too many wait."""
        future: Future[Any] = Future()
        with self._lock:
            self._heap = [entry for entry in self._heap if not entry[2].cancelled()]
            if len(self._heap) >= self.most:
                raise ApiError(
                    429,
                    f"{len(self._heap)} texts wait to be read already; try again later",
                    code="queue_full",
                    headers={"Retry-After": "5"},
                )
            heapq.heapify(self._heap)
            heapq.heappush(self._heap, (size, next(self._numbers), future, call))
        self._pool.submit(self._next)
        return future

    def _next(self) -> None:
        with self._lock:
            if not self._heap:
                return  # it was dropped
            _, _, future, call = heapq.heappop(self._heap)
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)


class Texts:
    """most: long texts that may wait."""

    def __init__(self, most: int) -> None:
        self._short, self._long = _Line("texts", MOST_SHORT), _Line("long texts", most)

    async def run(
        self, size: int, left: Callable[[], Awaitable[bool]] | None, call: Callable[[], Any]
    ) -> Any:
        """What a call returns. size: bytes of the body that it is about. left: whether the client
        has gone. Raises ApiError where too many wait, and where the client has gone.
        """
        if left is not None and await left():
            raise _gone()
        line = self._short if size <= SHORT else self._long
        future = line.submit(size, call)
        waited = asyncio.wrap_future(future)
        try:
            while not (await asyncio.wait([waited], timeout=LOOK))[0]:
                if left is not None and await left():
                    raise _gone()
            return waited.result()
        finally:
            future.cancel()  # where it has not begun


def _gone() -> ApiError:
    return ApiError(499, "the client left", code="client_left")
