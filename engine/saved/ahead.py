"""Work that runs ahead of whoever uses its results: reading and hashing the next pieces of a file
while the last one is copied. Reading and hashlib's sha256 leave the interpreter to others.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

DEPTH = 4  # results under way at once, and buffers that they fill
Result = TypeVar("Result")


@contextmanager
def ahead(
    work: Callable[[int], Result], count: int, depth: int = DEPTH
) -> Iterator[Iterator[Result]]:
    """Give the results of work(0) .. work(count-1), in order, `depth` of them under way on threads.

    work(i + depth) begins when result i + 1 is asked for: until then i's buffer is its user's. An
    exception of `work` is raised in its result's place. At the end of the context nothing runs.
    """
    threads = min(depth, count, max(2, os.cpu_count() or 1))
    with ThreadPoolExecutor(max(1, threads), "saved") as pool:
        under_way: deque[Future[Result]] = deque()

        def results() -> Iterator[Result]:
            for number in range(count):
                under_way.append(pool.submit(work, number))
                if len(under_way) == depth:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()

        try:
            yield results()
        finally:
            for future in under_way:
                future.cancel()
