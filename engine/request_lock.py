"""One running request per LLM: a lock that the same thread may take again and a second may not."""

import contextlib
import threading
from collections.abc import Iterator

from engine.errors import Busy


class RequestLock:
    """Held by the thread that runs a request. A second thread is refused, never kept waiting."""

    def __init__(self) -> None:
        self._owner: int | None = None
        self._depth = 0
        self._guard = threading.Lock()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; the same thread may nest. Raises Busy where another thread holds it."""
        me = threading.get_ident()
        with self._guard:
            if self._owner not in (None, me):
                raise Busy("this LLM is running another request; wait for it, or load a second LLM")
            self._owner = me
            self._depth += 1
        try:
            yield
        finally:
            with self._guard:
                self._depth -= 1
                if self._depth == 0:
                    self._owner = None
