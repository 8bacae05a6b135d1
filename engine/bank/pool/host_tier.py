"""The host memory that an LLM's sessions share: a pool of blocks, and the measured link to it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.bank.pool.host_pool import SLAB, HostPool
from engine.bank.pool.link import Link, measure_link
from engine.base.device import current


class HostTier:
    """Makes the pool and measures the link when they are first needed. LLMs over one model share
    it.

    limit: returns the bytes that the pool may allocate, None for no limit; asked when it is made. A
    small limit is taken in small slabs, so that blocks of several sizes find room in it.
    """

    def __init__(
        self,
        device: torch.device,
        limit: Callable[[], int | None],
        pool: HostPool | None = None,
    ) -> None:
        self._device, self._limit = device, limit
        self._pool = pool
        self._link: Link | None = None

    @property
    def pool(self) -> HostPool:
        """The pool, ready for sessions."""
        return self._measured()[0]

    @property
    def idle(self) -> int:
        """Bytes that the pool holds and nobody uses: free to a plan. 0 before there is a pool."""
        return 0 if self._pool is None else self._pool.idle

    @property
    def rate(self) -> float:
        """Bytes per second of a contiguous copy, where the link was measured; else 0."""
        return 0.0 if self._link is None else self._link.copy or 0.0

    @property
    def link(self) -> Link:
        """How rows travel between the pool and the device."""
        return self._measured()[1]

    def _measured(self) -> tuple[HostPool, Link]:
        if self._pool is None:
            limit = self._limit()
            slab = SLAB if limit is None else min(SLAB, max(1 << 20, limit // 16))
            self._pool = HostPool(limit, slab)
        if self._link is None:
            with current(self._device):
                self._link = measure_link(self._pool, self._device)
            self._pool.programs = self._link.programs
        return self._pool, self._link
