"""One running request per LLM. A request is a call, or an answer that is taken piece by piece."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from weakref import WeakKeyDictionary

from engine.base.errors import Busy

LOOK = 0.002  # seconds between two looks of one who waits; a step takes about as long


class RequestLock:
    """Refuses a second request while one runs. wait: the second request waits for its turn
    instead, in order of arrival. beside: another lock, whose holders exclude this one's.

    A call holds the lock in its own thread and may nest other calls. A streamed answer (a
    `Request`) holds it from its first piece to its last, but runs in whichever thread asks for the
    next piece, as the thread pool of a web framework does. Between two pieces only the thread that
    took the last one may begin another request.

    A holder is entered before it looks for others, so that two never run at once. Entries are weak:
    if an interrupt leaves one behind, it goes with its frame. That wakes no one, so waiting threads
    look again at intervals.
    """

    def __init__(self, wait: bool = False, beside: RequestLock | None = None) -> None:
        self.wait = wait
        self.queue: list[weakref.ref[_Hold]] = []
        # a call or a piece under way -> its thread
        self._running: WeakKeyDictionary[_Hold, int] = WeakKeyDictionary()
        # an open answer -> the thread of its last piece
        self._answers: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        if beside is not None:
            self.queue, self._running = beside.queue, beside._running
            self._answers = beside._answers

    @property
    def waiting(self) -> list[_Hold]:
        """Who waits, the first to come first."""
        return [hold for reference in list(self.queue) if (hold := reference()) is not None]

    @property
    def free(self) -> bool:
        """Whether nobody holds the lock."""
        return not self._running and not self._answers

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock for a call. Where another request is running, raises Busy or waits."""
        return _Hold(self, None)

    def request(self) -> Request:
        """A streamed answer, which holds the lock from its first piece on."""
        return Request(self)


class Request:
    """An answer that is taken piece by piece, in any thread."""

    def __init__(self, lock: RequestLock) -> None:
        self._lock = lock

    def piece(self) -> contextlib.AbstractContextManager[None]:
        """Hold the lock while a piece is made; where another request is running, as `held`."""
        return _Hold(self._lock, self)

    def end(self) -> None:
        """Free the lock."""
        self._lock._answers.pop(self, None)


class _Hold:
    """The lock, held by this thread. A class, because an interrupt (a signal, an asynchronous
    exception) between a generator's `yield` and the body of its `with` would leave it held.
    """

    def __init__(self, lock: RequestLock, request: Request | None) -> None:
        self._lock, self._request = lock, request

    def __enter__(self) -> None:
        lock = self._lock
        if not lock.wait:
            return self._begin()
        mine = weakref.ref(self)
        try:
            queued = not self._begun()
            if queued:
                lock.queue.append(mine)
            while True:
                if not queued or lock.waiting[0] is self:
                    with contextlib.suppress(Busy):
                        return self._begin()
                time.sleep(LOOK)
        finally:
            if mine in lock.queue:
                lock.queue.remove(mine)

    def _begun(self) -> bool:
        """Whether this goes on with what runs, so that it passes those who wait for its end."""
        lock = self._lock
        threads = [*lock._running.values(), *lock._answers.values()]
        return threading.get_ident() in threads or self._request in list(lock._answers)

    def _begin(self) -> None:
        lock, request, me = self._lock, self._request, threading.get_ident()
        try:
            nested = me in list(lock._running.values())
            lock._running[self] = me
            threads = set(lock._running.values())
            if not nested and (request is None or request not in lock._answers):
                threads |= set(lock._answers.values())
            if threads != {me}:
                raise Busy(
                    "this LLM is running another request; wait for it (LLM(..., wait=True) does), "
                    "or load a second LLM"
                )
            if request is not None:
                lock._answers[request] = me
        except BaseException:
            lock._running.pop(self, None)
            raise

    def __exit__(self, *_: object) -> None:
        self._lock._running.pop(self, None)
