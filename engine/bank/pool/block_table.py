"""The block table of one sequence: which host blocks hold its tokens."""

from __future__ import annotations

import torch

from engine.bank.pool.host_pool import Block, HostPool
from engine.base.interrupts import complete
from kernels.tier.gather import BLOCK_TOKENS


class BlockTable:
    """The host blocks of one group. blocks[i] holds tokens 64 i .. 64 i + 63. addresses, int64
    [blocks of `capacity` tokens] on the device, tells kernels where they lie.

    A block on its way to another place is in _loose, the blocks without a place. An interrupt
    leaves it there, and the next call gives it back.
    """

    def __init__(
        self, pool: HostPool, block_bytes: int, capacity: int, device: torch.device | str
    ) -> None:
        self.pool, self.block_bytes = pool, block_bytes
        self.blocks: list[Block] = []
        self._loose: list[Block] = []
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
        self._give_back()
        self.pool.take(self.block_bytes, len(shared) + more, self._loose)
        for i in shared:
            self._replace(i)
        self._append(more)
        self._give_back()
        return bool(shared)

    def share(self, other: BlockTable, length: int) -> None:
        """Hold another table's blocks of the first `length` tokens too."""
        blocks = other.blocks[: -(-length // BLOCK_TOKENS)]
        self._give_back()
        self.pool.retain(blocks, self._loose)
        self._append(len(blocks))

    def cut(self, length: int) -> None:
        """Give back the blocks past `length` tokens."""
        keep = -(-length // BLOCK_TOKENS)
        loose = [*self._loose, *self.blocks[keep:]]

        def cut() -> None:
            self.blocks[keep:], self._loose = [], loose

        complete(cut)
        self._give_back()

    def _give_back(self) -> None:
        """Give back the blocks that have no place."""
        if self._loose:
            self.pool.release(self._loose)

    def _replace(self, i: int) -> None:
        """Put a copy into the first loose block, and that in the place of blocks[i]."""
        old, (block, *rest) = self.blocks[i], self._loose
        block.bytes.copy_(old.bytes)

        def replace() -> None:
            self.addresses[i].fill_(block.address)
            self.blocks[i], self._loose = block, [*rest, old]

        complete(replace)

    def _append(self, count: int) -> None:
        """Give the first `count` loose blocks the places after the last."""
        if not count:
            return
        at, blocks, rest = len(self.blocks), self._loose[:count], self._loose[count:]

        def append() -> None:
            if count == 1:  # decode: a fill is a kernel argument, nothing waits
                self.addresses[at].fill_(blocks[0].address)
            else:
                self.addresses[at : at + count] = torch.tensor(
                    [block.address for block in blocks], dtype=torch.int64
                )
            self.blocks[at:], self._loose = blocks, rest

        complete(append)
