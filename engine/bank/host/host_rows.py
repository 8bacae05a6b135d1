"""The offloaded layers in host memory, addressed by layer and position.

A host block holds 64 tokens. Within a block every offload group has a region of 64 rows. A row
holds one token's K and V of all layers of the group side by side, so that one copy moves a token's
rows of the whole group.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.bank.pool.block_table import BlockTable
from engine.bank.pool.host_pool import HostPool
from kernels.tier.gather import BLOCK_TOKENS, move_rows


class HostRows:
    """One sequence's rows in the blocks of `pool`, and the copies from and to them.

    groups: the layers that share a row, one tuple per group. backend: kernel backend of the copies.
    Copies run on the current stream; the caller has issued the waits that they need.
    """

    def __init__(
        self,
        groups: Iterable[tuple[int, ...]],
        part_bytes: int,
        pool: HostPool,
        capacity: int,
        device: torch.device,
        backend: str,
    ) -> None:
        self.pool, self.backend, self.part_bytes = pool, backend, part_bytes
        # of each layer: bytes from a block to its first row, and from one token's row to the next
        self._place: dict[int, tuple[int, int]] = {}
        block_bytes = 0
        for group in groups:
            pitch = part_bytes * len(group)
            for i, layer in enumerate(group):
                self._place[layer] = block_bytes + i * part_bytes, pitch
            block_bytes += BLOCK_TOKENS * pitch
        self.table = BlockTable(pool, block_bytes, capacity, device)

    def read(
        self,
        layer: int,
        tokens: torch.Tensor | int,
        buffer: torch.Tensor,
        slots: torch.Tensor | int,
        count: torch.Tensor | int,
        moved: torch.Tensor | None = None,
        programs: int | None = None,
        backend: str | None = None,
        skip: int = 0,
    ) -> None:
        """Copy host rows to the device: buffer[slots[i]] = row of tokens[i], for i < count.

        tokens, slots: int32 [n], or the first of consecutive ones. count: int32 [1] or an int.
        buffer: rows of the layer, or wider ones that go on into the layers after it in the group,
        or narrower ones, of what comes behind the first `skip` bytes of a row. moved, programs: as
        in kernels.tier.gather.move_rows.
        """
        offset, pitch = self._place[layer]
        move_rows(
            self.table.addresses,
            offset + skip,
            pitch,
            buffer.view(torch.int32),
            tokens,
            slots,
            count,
            self.pool.slabs,
            moved=moved,
            programs=programs,
            backend=backend or self.backend,
        )

    def write(
        self, layer: int, token: torch.Tensor | int, buffer: torch.Tensor, slot: int, count: int
    ) -> None:
        """Copy device rows to the host: rows token .. token+count-1, or those of a list int32
        [count] of different ones, from buffer[slot:]. buffer: as in `read`.
        """
        offset, pitch = self._place[layer]
        move_rows(
            self.table.addresses,
            offset,
            pitch,
            buffer.view(torch.int32),
            token,
            slot,
            count,
            self.pool.slabs,
            to_host=True,
            backend=self.backend,
        )
