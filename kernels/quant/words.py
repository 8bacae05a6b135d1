"""Weights of few bits as kernels/quant/gemv.py and gemm.py read them: 32-bit words whose parts are
unpacked two at a time.

Part i of a word is its i-th byte or nibble from below. One shift and one mask leave parts i and
i + P / 2 of P in a word's two halves, as two numbers of 16 bits: the values of two neighbouring
columns, as one register of a tensor core's operand holds them (Marlin's idea, arXiv 2408.11743).

A block is 16 words: four parts of 16 columns of int8 or 32 of int4. A tensor core's operand has
its columns on four lanes. Words 4 t to 4 t + 3 are lane t's, 16 bytes at once, one of each part:
columns 4 t to 4 t + 3 of the part's first 16, which are a word's pairs 0 and 1, and the same of the
other 16, which are 2 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.quant.matrix import Quantised, blocks, nibbles, packed_nibbles

BLOCK_WORDS = 16
LANES = 4
PARTS = {"int8": 4, "int4": 8}  # of a word


@dataclass(frozen=True)
class Words:
    """A matrix [O, I] of int8 or int4.

    values: int32 [O, 16 * blocks], the last block of a row filled up with columns that are never
    multiplied. scales: floating point [O, ceil(I / group)]; offsets: the same shape, or None. Where
    `joined`, an offset lies behind its scale, in one word.
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
        words = cls(weight.kind, weight.shape, values, scales, offsets, weight.group)
        if words.joined and offsets is not None:
            scales, offsets = torch.stack((scales, offsets), -1).unbind(-1)
            words = replace(words, scales=scales, offsets=offsets)
        return words

    @property
    def nbytes(self) -> int:
        """Bytes of values, scales and offsets."""
        held = (self.values, self.scales, self.offsets)
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    @property
    def joined(self) -> bool:
        """Whether an offset lies behind its scale: where both are of one dtype of 16 bits."""
        if self.offsets is None:
            return False
        return self.scales.dtype == self.offsets.dtype and self.scales.itemsize == 2

    @property
    def columns_of_block(self) -> int:
        """Columns of 16 words."""
        return BLOCK_WORDS * PARTS[self.kind]

    def room(self, count: int) -> Words:
        """Make room for `count` matrices of this form below each other: uninitialised."""
        shape = count * self.shape[0], self.shape[1]
        values = self.values.new_empty(shape[0], self.values.shape[1])
        scales = self.scales.new_empty(shape[0], self.scales.shape[1], 2 if self.joined else 1)
        offsets = None
        if self.joined:
            scales, offsets = scales.unbind(-1)
        else:
            scales = scales[..., 0]
            if self.offsets is not None:
                offsets = self.offsets.new_empty(shape[0], self.offsets.shape[1])
        return replace(self, shape=shape, values=values, scales=scales, offsets=offsets)

    def quantised(self, rows: slice | torch.Tensor) -> Quantised:
        """Some rows, a slice or int64 indices, as they came: values [rows, I] in few bits."""
        found = self.values[rows].contiguous().view(torch.uint8)
        parts = found if self.kind == "int8" else nibbles(found)
        # [rows, blocks, lane, part, one of a pair, half, pair of it] to columns side by side
        apart = parts.view(len(found), -1, LANES, 4, 2, PARTS[self.kind] // 4, 2)
        whole = apart.permute(0, 1, 3, 5, 2, 6, 4).reshape(len(found), -1)[:, : self.shape[1]]
        values = whole.view(torch.int8) if self.kind == "int8" else packed_nibbles(whole)
        offsets = None if self.offsets is None else self.offsets[rows]
        return Quantised(self.kind, values, self.scales[rows], self.group, offsets)

    def rows(self, rows: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise some rows, a slice or int64 indices: [rows, I] of `dtype`."""
        return self.quantised(rows).rows(slice(None), dtype)


def held_as_words(kind: str, group: int, columns: int, plain: bool = True) -> bool:
    """Whether words can hold a matrix: int8 or int4 whose groups are whole parts of blocks, or
    whole rows.

    plain: without a table and outliers.
    """
    if kind not in PARTS or not plain:
        return False
    return group >= columns or group % (LANES * PARTS[kind]) == 0


def row_words(kind: str, columns: int) -> int:
    """Words of a row."""
    return -(-columns // (BLOCK_WORDS * PARTS[kind])) * BLOCK_WORDS


def _plain(weight: Quantised) -> bool:
    return weight.table is None and weight.outliers is None


def _laid_out(kind: str, values: torch.Tensor, words: int) -> torch.Tensor:
    """Values as Quantised holds them, to int32 [rows, words]."""
    whole = values.view(torch.uint8) if kind == "int8" else nibbles(values)
    short = words * PARTS[kind] - whole.shape[1]
    whole = torch.nn.functional.pad(whole, (0, short))
    whole = whole.view(len(whole), -1, 4, PARTS[kind] // 4, LANES, 2, 2)
    whole = whole.permute(0, 1, 4, 2, 6, 3, 5)
    parts = whole.reshape(len(whole), -1)
    if kind == "int4":
        parts = packed_nibbles(parts)
    return parts.contiguous().view(torch.int32)
