"""The block table of one sequence: which host blocks hold its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.gather import BLOCK_TOKENS

if TYPE_CHECKING:
    from engine.bank.host_pool import Block, HostPool


class BlockTable:
    """blocks[i] holds tokens 64 i .. 64 i + 63. addresses int64 [blocks of `capacity` tokens], on
    the device, tells kernels where.
    """

    def __init__(
        self, pool: HostPool, block_bytes: int, capacity: int, device: torch.device | str
    ) -> None:
        self.pool, self.block_bytes = pool, block_bytes
        self.blocks: list[Block] = []
        self.addresses = torch.zeros(-(-capacity // BLOCK_TOKENS), dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.addresses.nbytes

    @property
    def host_nbytes(self) -> int:
        """Bytes of host blocks held, shared ones included."""
        return len(self.blocks) * self.block_bytes

    def shares(self, start: int, stop: int) -> bool:
        """Whether a block of positions start .. stop-1 has another holder."""
        blocks = self.blocks[start // BLOCK_TOKENS : -(-stop // BLOCK_TOKENS)]
        return any(block.refs > 1 for block in blocks)

    def reserve(self, start: int, stop: int) -> bool:
        """Make positions start .. stop-1 writable: their blocks exist and have no other holder.

        A shared block is replaced by a copy (fork); the caller has waited for transfers to it.
        Returns whether there was one. Raises OutOfHostMemory, nothing changed.
        """
        first, wanted = start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)
        shared = [i for i in range(first, min(wanted, len(self.blocks))) if self.blocks[i].refs > 1]
        more = max(0, wanted - len(self.blocks))
        if not shared and not more:
            return False
        fresh = self.pool.take(self.block_bytes, len(shared) + more)
        for i in shared:
            block = fresh.pop()
            block.bytes.copy_(self.blocks[i].bytes)
            self.pool.release([self.blocks[i]])
            self.blocks[i] = block
            self.addresses[i].fill_(block.address)
        self._append(fresh)
        return bool(shared)

    def share(self, other: BlockTable, length: int) -> None:
        """Hold another table's blocks of the first `length` tokens too."""
        blocks = other.blocks[: -(-length // BLOCK_TOKENS)]
        self.pool.retain(blocks)
        self._append(list(blocks))

    def cut(self, length: int) -> None:
        """Give back the blocks past `length` tokens."""
        keep = -(-length // BLOCK_TOKENS)
        gone, self.blocks[keep:] = self.blocks[keep:], []
        self.pool.release(gone)

    def _append(self, blocks: list[Block]) -> None:
        if not blocks:
            return
        at = len(self.blocks)
        self.blocks.extend(blocks)
        if len(blocks) == 1:  # decode: a fill is a kernel argument, nothing waits
            self.addresses[at].fill_(blocks[0].address)
        else:
            self.addresses[at : at + len(blocks)] = torch.tensor(
                [block.address for block in blocks], dtype=torch.int64
            )
