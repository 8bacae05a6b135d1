"""Which host blocks hold a sequence's tokens: the block table of one sequence."""

import torch

from kernels.gather import BLOCK_TOKENS


class BlockTable:
    """The blocks of one sequence: `blocks[i]` holds tokens 64 i .. 64 i + 63; `addresses` int64 on
    the device says where.
    """

    def __init__(self, pool, block_bytes, capacity, device):
        self.pool, self.block_bytes, self.blocks = pool, block_bytes, []
        self.addresses = torch.zeros(-(-capacity // BLOCK_TOKENS), dtype=torch.int64, device=device)

    def reserve(self, start, stop):
        """Make positions start .. stop-1 writable: blocks exist and are nobody else's. All or
        nothing (OutOfHostMemory).

        A shared block is replaced by a copy (fork); whoever calls has waited for transfers to it.
        Returns whether any was.
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

    def shares(self, start, stop):
        """Whether a block of positions start .. stop-1 has another holder."""
        return any(
            b.refs > 1 for b in self.blocks[start // BLOCK_TOKENS : -(-stop // BLOCK_TOKENS)]
        )

    def _append(self, blocks):
        if not blocks:
            return
        at = len(self.blocks)
        self.blocks.extend(blocks)
        if len(blocks) == 1:  # decode: a fill is a kernel argument, nothing waits
            self.addresses[at].fill_(blocks[0].address)
        else:
            self.addresses[at : at + len(blocks)] = torch.tensor(
                [b.address for b in blocks], dtype=torch.int64
            )

    def share(self, other, length):
        """Hold another table's blocks of the first `length` tokens too."""
        blocks = other.blocks[: -(-length // BLOCK_TOKENS)]
        self.pool.retain(blocks)
        self._append(list(blocks))

    def cut(self, length):
        """Give back the blocks past `length` tokens."""
        keep = -(-length // BLOCK_TOKENS)
        gone, self.blocks[keep:] = self.blocks[keep:], []
        self.pool.release(gone)
