"""Sums of the V of every prefix of a text, in constant work per token, which follow the bank back.

What is kept: the sum of all whole blocks before each block, and the prefixes of a block for the
newest BLOCK rows. Sums are in float64 and added row after row, so that they do not depend on how a
text was cut into chunks.
"""

from __future__ import annotations

import torch

from engine.methods.select.base import Buffer
from kernels.index.learn import Learnt, add_value, told_value
from kernels.rows.forms import floats

BLOCK = 64


class ValueSums:
    """Of every layer and sequence. prefix [layers, B, Hkv, BLOCK, D]: of the row in slot t % BLOCK
    the sum of its block up to it; blocks [layers, B, Hkv, N, D]: the sum before each block. means
    float32 [layers, B, Hkv, D], or None: room for what `mean_of` leaves.
    """

    def __init__(
        self,
        prefix: torch.Tensor,
        blocks: torch.Tensor,
        means: torch.Tensor | None = None,
        backend: str = "auto",
    ):
        self.prefix, self.blocks, self.means, self._backend = prefix, blocks, means, backend
        blocks[:, :, :, 0] = 0.0
        # one past the newest row ever added, whose slot is the last that was written over
        self._high = [[0] * prefix.shape[1] for _ in range(len(prefix))]
        self._meant = [[0] * prefix.shape[1] for _ in range(len(prefix))]  # rows of the means

    @staticmethod
    def buffers(
        layers: int, batch: int, heads: int, capacity: int, dim: int
    ) -> tuple[Buffer, Buffer]:
        """(prefix, blocks)."""
        sizes = BLOCK, capacity // BLOCK + 1
        prefix, blocks = (
            Buffer((layers, batch, heads, size, dim), torch.float64) for size in sizes
        )
        return prefix, blocks

    def begins(self, layer: int, b: int, first: int) -> int:
        """From which row on `add` goes on where rows from `first` on are others: `first`, if the
        slot of the row before it still holds its prefix.
        """
        held = first % BLOCK == 0 or first > self._high[layer][b] - BLOCK
        return first if held else first // BLOCK * BLOCK

    def add(self, layer: int, b: int, first: int, v: torch.Tensor) -> None:
        """Add rows first .. first+n-1, v [Hkv, n, D] of any form; the sums of those before are
        known.
        """
        prefix, blocks = self.prefix[layer, b], self.blocks[layer, b]
        n = v.shape[1]
        self._high[layer][b] = max(self._high[layer][b], first + n)
        self._meant[layer][b] = 0
        if n == 1 and self.means is not None:
            given = prefix, blocks, first, v, self.means[layer, b]
            if add_value(*given, self._backend):
                self._meant[layer][b] = first + 1
                return
        v = floats(v)
        if n == 1:
            self._add_one(prefix, blocks, first, v[:, 0])
            return
        heads, _, dim = v.shape
        stop, before, number = first + n, first % BLOCK, first // BLOCK
        whole = -(-stop // BLOCK) - number
        rows = prefix.new_zeros(heads, whole * BLOCK, dim)
        rows[:, before : before + n] = v
        if before:
            rows[:, before - 1] = prefix[:, before - 1]
        sums = rows.view(heads, whole, BLOCK, dim).cumsum(2)
        full = stop // BLOCK - number
        totals = torch.cat([blocks[:, number : number + 1], sums[:, :full, -1]], 1).cumsum(1)
        blocks[:, number : number + full + 1] = totals
        newest = torch.arange(max(first, stop - BLOCK), stop, device=v.device)
        prefix[:, newest % BLOCK] = sums.flatten(1, 2)[:, newest - number * BLOCK]

    def told(self, layer: int, b: int, v: torch.Tensor) -> Learnt:
        """What C++ is told of rows v [Hkv, T, D], to add one of them and leave the mean."""
        assert self.means is not None
        return told_value(self.prefix[layer, b], self.blocks[layer, b], v, self.means[layer, b])

    def note(self, layer: int, b: int, n: int) -> None:
        """Note that C++ adds the last of n rows."""
        self._high[layer][b] = max(self._high[layer][b], n)
        self._meant[layer][b] = n

    @staticmethod
    def _add_one(prefix: torch.Tensor, blocks: torch.Tensor, first: int, v: torch.Tensor) -> None:
        """The same of one row v [Hkv, D], as every step adds one."""
        slot, number = first % BLOCK, first // BLOCK
        total = prefix[:, slot]
        total.copy_(v)
        if slot:
            total += prefix[:, slot - 1]
        if slot == BLOCK - 1:
            torch.add(blocks[:, number], total, out=blocks[:, number + 1])

    def mean(self, layer: int, b: int, n: int) -> torch.Tensor:
        """The mean of rows 0 .. n-1, float64 [Hkv, D]; n > 0."""
        last = n - 1
        block = self.blocks[layer, b, :, last // BLOCK]
        return (block + self.prefix[layer, b, :, last % BLOCK]) / n

    def mean_of(self, layer: int, b: int, n: int) -> None:
        """Leave the mean of rows 0 .. n-1 in `means`, where it is not yet."""
        if self._meant[layer][b] != n:
            assert self.means is not None
            self.means[layer, b] = self.mean(layer, b, n)
            self._meant[layer][b] = n
