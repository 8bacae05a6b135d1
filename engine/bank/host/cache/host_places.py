"""Places for blocks in host memory, of which the device has those that were read last.

Each of `layers` has its first tokens and `kept.held` places as rows of one table (host_rows.py),
whose host blocks are taken as places are first used: up to the places' bytes, and no more however
long the text is. Rows are written from a staging buffer and read through CachedBlocks, all on the
current stream, so that no event is needed between them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial

import torch

from engine.bank.host.cache.cached_blocks import CachedBlocks
from engine.bank.host.host_rows import HostRows
from engine.bank.pool.block_table import BlockTable
from engine.bank.pool.host_pool import HostPool
from engine.bank.row_layout import RowLayout
from engine.base.device import synchronize
from engine.base.interrupts import complete
from engine.plan.needs import BlockCache
from kernels.tier.gather import BLOCK_TOKENS


class HostPlaces:
    """kept: first tokens and places of each layer; cache: what the device keeps of them. backend:
    of the copies.
    """

    def __init__(
        self,
        layers: Sequence[int],
        kept: BlockCache,
        cache: BlockCache,
        layout: RowLayout,
        pool: HostPool,
        backend: str,
    ) -> None:
        self.layers, self._kept, self._layout = frozenset(layers), kept, layout
        # unpinned rows go through the CPU
        readable = pool.pinned or layout.device.type == "cpu"
        backend = backend if readable else "reference"
        groups = [(layer,) for layer in layers]
        size, device = layout.part_bytes, layout.device
        self._host = HostRows(groups, size, pool, kept.rows, device, backend)
        self._staging = layout.empty(kept.size)
        given = cache, kept.rows, layout, self._host, self
        self.cached = CachedBlocks(layers, *given)
        self._end = weakref.finalize(self, _give_back, self._host.table, device)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._staging.nbytes + self.cached.nbytes + self._host.table.nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes of host memory held."""
        return self._host.table.host_nbytes

    @property
    def pin_seconds(self) -> float:
        """Seconds that the pool has spent on page-locking memory."""
        return self._host.pool.pin_seconds

    def reserve(self, rows: int) -> None:
        """Have host memory for the first `rows` rows of every layer. Raises OutOfHostMemory,
        nothing changed.
        """
        if len(self._host.table.blocks) * BLOCK_TOKENS < rows:
            self._host.table.reserve(0, rows)

    def write(self, layer: int, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put k, v [Hkv, n, width] into `rows` int64 [n], for which there is room."""
        for first in range(0, len(rows), self._kept.size):
            part = slice(first, first + self._kept.size)
            count, new_k, new_v = len(rows[part]), k[:, part], v[:, part]
            staged = self._staging[:count]
            self._layout.fill(staged, new_k.transpose(0, 1), new_v.transpose(0, 1))
            self._host.write(layer, rows[part].int(), self._staging, 0, count)

    def read(self, layer: int, first: int, stop: int, out: torch.Tensor) -> int:
        """Copy rows first .. stop-1 of a layer to out[0:]; bytes that came over the link."""
        self._host.read(layer, first, out, 0, stop - first)
        return (stop - first) * self._layout.part_bytes

    def block_rows(
        self, layer: int, first: int, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [1, Hkv, first + n * size, width] of the first tokens and of `places`, int [n]
        ascending: copies.
        """
        return self._layout.views(self.cached.read(layer, first, places))

    def share(self, other: HostPlaces) -> None:
        """Hold a copy of what another has, in an empty table."""
        # race: its rows may still be on their way to the host
        synchronize(self._layout.device)
        rows = len(other._host.table.blocks) * BLOCK_TOKENS
        self._host.table.share(other._host.table, rows)
        self._host.table.reserve(0, rows)  # which place is written next only the device knows

    def close(self) -> None:
        """Give the memory back."""
        if (alive := self._end.peek()) is not None:
            _, give_back, given, _ = alive
            complete(partial(give_back, *given))
            self._end.detach()
        self.cached.close()
        self._staging = self._staging[:0]


def _give_back(table: BlockTable, device: torch.device) -> None:
    # race: freed memory would still be read or written
    synchronize(device)
    table.cut(0)
