"""A matrix in few bits: the one form that every quantised format is read into.

W[o, i] = values[o, i] * scales[o, i // group] + offsets[o, i // group], where a `table` replaces a
4-bit value by its entry. Formats that store a zero point z have offsets = -z * scales. Inputs may
be permuted (act-order): column j then belongs to input permutation[j].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

KINDS = ("int8", "int4", "fp8")
BLOCK = 1 << 20  # elements that are dequantised at a time


@dataclass(frozen=True)
class Quantised:
    """A matrix [O, I] of few bits.

    kind: one of KINDS. values: int8 [O, I]; uint8 [O, I / 2] with the even column in the low four
    bits, 0 to 15; or float8_e4m3fn [O, I]. scales: floating point [O, ceil(I / group)]; offsets:
    the same shape, or None for zero. group: columns under one scale. permutation: int64 [I] or
    None. table: float32 [16], what 4-bit values stand for, or None for themselves.
    """

    kind: str
    values: torch.Tensor
    scales: torch.Tensor
    group: int
    offsets: torch.Tensor | None = None
    permutation: torch.Tensor | None = None
    table: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(O, I)."""
        rows, columns = self.values.shape
        return rows, columns * 2 if self.kind == "int4" else columns

    @property
    def device(self) -> torch.device:
        """Where the values are."""
        return self.values.device

    @property
    def per_row(self) -> bool:
        """Whether a row has one scale and nothing else: int8 as products of integers want it."""
        plain = self.offsets is None and self.permutation is None
        return self.kind == "int8" and plain and self.scales.shape[1] == 1

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = (self.values, self.scales, self.offsets, self.permutation, self.table)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def to(self, device: torch.device | str) -> Quantised:
        """The same matrix on a device."""
        return Quantised(
            self.kind,
            self.values.to(device),
            self.scales.to(device),
            self.group,
            None if self.offsets is None else self.offsets.to(device),
            None if self.permutation is None else self.permutation.to(device),
            None if self.table is None else self.table.to(device),
        )

    def numbers(self, rows: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What the values of some rows stand for before scales: [rows, I], columns as stored."""
        values = self.values[rows]
        if self.kind != "int4":
            return values.to(dtype)
        apart = nibbles(values)
        return apart.to(dtype) if self.table is None else self.table.to(dtype)[apart.int()]

    def rows(self, rows: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise some rows, a slice or int64 indices, in `dtype`: [rows, I] in the inputs'
        order. Products are rounded once, from float32.
        """
        out = self.numbers(rows, torch.float32)
        scales = self.scales[rows].float()
        offsets = None if self.offsets is None else self.offsets[rows].float()
        if scales.shape[1] > 1:
            out = self._grouped(out, scales, offsets)
        else:
            out *= scales
            if offsets is not None:
                out += offsets
        if self.permutation is not None:
            apart = torch.empty_like(out)
            apart[:, self.permutation] = out
            out = apart
        return out.to(dtype)

    def _grouped(
        self, out: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor | None
    ) -> torch.Tensor:
        count, columns = out.shape
        if columns % self.group:  # the last group is short
            spread = scales.repeat_interleave(self.group, 1)[:, :columns]
            out *= spread
            if offsets is not None:
                out += offsets.repeat_interleave(self.group, 1)[:, :columns]
            return out
        apart = out.view(count, -1, self.group)
        apart *= scales[:, :, None]
        if offsets is not None:
            apart += offsets[:, :, None]
        return out

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise everything, BLOCK elements at a time: [O, I] in `dtype`."""
        out = torch.empty(self.shape, dtype=dtype, device=self.device)
        for part in blocks(self.shape):
            out[part] = self.rows(part, dtype)
        return out


def blocks(shape: Sequence[int], size: int = BLOCK) -> list[slice]:
    """Slices of the rows of a matrix, about `size` elements each."""
    step = max(1, size // shape[1])
    return [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


def nibbles(values: torch.Tensor) -> torch.Tensor:
    """Unpack uint8 [O, I / 2] to uint8 [O, I]: the low four bits first."""
    return torch.stack((values & 15, values >> 4), -1).flatten(-2)


def packed_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Pack uint8 [O, I] of values up to 15 to uint8 [O, I / 2]: the even column in the low bits."""
    return values[:, 0::2] | (values[:, 1::2] << 4)


def joined(parts: Sequence[Quantised]) -> Quantised | None:
    """Put matrices of equal form below each other; None where their forms differ."""
    first = parts[0]
    if len(parts) == 1:
        return first
    for other in parts[1:]:
        alike = (other.kind, other.group, other.scales.dtype, other.shape[1]) == (
            first.kind,
            first.group,
            first.scales.dtype,
            first.shape[1],
        )
        same = all(
            (a is None) == (b is None) and (a is None or b is None or torch.equal(a, b))
            for a, b in ((first.permutation, other.permutation), (first.table, other.table))
        )
        if not alike or not same or (first.offsets is None) != (other.offsets is None):
            return None
    offsets = [part.offsets for part in parts if part.offsets is not None]
    return Quantised(
        first.kind,
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        first.group,
        torch.cat(offsets) if offsets else None,
        first.permutation,
        first.table,
    )
