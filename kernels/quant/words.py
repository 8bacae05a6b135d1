"""Weights of few bits as the kernels of few_bits.py read them: 32-bit words whose parts are columns
that lie apart.

A block is 4 words, 16 bytes that one thread loads at once: 16 columns of int8 or 32 of int4. Part i
of word w, the i-th byte or nibble from below, belongs to column 4 i + w. So what a thread unpacks
with one shift and mask from each of its 4 words belongs to 4 columns that lie side by side, and
rows of x are read 4 values at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.quant.matrix import Quantised, blocks, nibbles, packed_nibbles

WORDS = 4  # of a block
PARTS = {"int8": 4, "int4": 8}  # of a word


@dataclass(frozen=True)
class Words:
    """A matrix [O, I] of int8 or int4.

    values: int32 [O, 4 * blocks], the last block of a row filled up with columns that are never
    multiplied. scales: floating point [O, ceil(I / group)]; offsets: the same shape, or None.
    """

    kind: str
    shape: tuple[int, int]
    values: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    group: int

    @classmethod
    def of(cls, weight: Quantised) -> Words:
        """Lay a matrix [O, I] out. Raises ValueError unless `held_as_words`."""
        if not held_as_words(weight.kind, weight.group, weight.shape[1], _plain(weight)):
            raise ValueError(f"{weight.kind} in groups of {weight.group}: no words hold that")
        rows, columns = weight.shape
        values = torch.empty(
            rows, row_words(weight.kind, columns), dtype=torch.int32, device=weight.device
        )
        for part in blocks(weight.shape):
            values[part] = _laid_out(weight.kind, weight.values[part], values.shape[1])
        scales, offsets = weight.scales.contiguous(), weight.offsets
        if offsets is not None:
            offsets = offsets.contiguous()
        return cls(weight.kind, weight.shape, values, scales, offsets, weight.group)

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales and offsets."""
        held = (self.values, self.scales, self.offsets)
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    @property
    def columns_of_block(self) -> int:
        """Columns of 4 words."""
        return WORDS * PARTS[self.kind]

    def quantised(self, rows: slice | torch.Tensor) -> Quantised:
        """Some rows, a slice or int64 indices, as they came: values [rows, I] in few bits."""
        found = self.values[rows].contiguous().view(torch.uint8)
        count = len(found)
        if self.kind == "int8":
            # bytes of a word lie in the order of its parts
            apart = found.view(count, -1, WORDS, 4).transpose(2, 3).reshape(count, -1)
            values = apart.view(torch.int8)[:, : self.shape[1]]
        else:
            apart = nibbles(found.view(count, -1, 1)).view(count, -1, WORDS, 8)
            whole = apart.transpose(2, 3).reshape(count, -1)[:, : self.shape[1]]
            values = packed_nibbles(whole)
        offsets = None if self.offsets is None else self.offsets[rows]
        return Quantised(self.kind, values, self.scales[rows], self.group, offsets)

    def rows(self, rows: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise some rows, a slice or int64 indices: [rows, I] of `dtype`."""
        return self.quantised(rows).rows(slice(None), dtype)


def held_as_words(kind: str, group: int, columns: int, plain: bool = True) -> bool:
    """Whether words can hold a matrix: int8 or int4 whose groups are whole blocks, or whole rows.

    plain: without a table and outliers.
    """
    if kind not in PARTS or not plain:
        return False
    return group >= columns or group % (WORDS * PARTS[kind]) == 0


def row_words(kind: str, columns: int) -> int:
    """Words of a row."""
    return -(-columns // (WORDS * PARTS[kind])) * WORDS


def _plain(weight: Quantised) -> bool:
    return weight.table is None and weight.outliers is None


def _laid_out(kind: str, values: torch.Tensor, words: int) -> torch.Tensor:
    """Values as Quantised holds them, to int32 [rows, words]."""
    whole = values.view(torch.uint8) if kind == "int8" else nibbles(values)
    short = words * PARTS[kind] - whole.shape[1]
    whole = torch.nn.functional.pad(whole, (0, short)).view(len(whole), -1, PARTS[kind], WORDS)
    if kind == "int4":
        whole = whole[:, :, 0::2] | (whole[:, :, 1::2] << 4)
    return whole.transpose(2, 3).contiguous().view(torch.int32).view(len(whole), words)
