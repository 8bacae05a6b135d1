"""A matrix in few bits: the one form that every quantised format is read into.

W[o, i] = values[o, i] * scales[o, i // group] + offsets[o, i // group], where a `table` replaces a
4-bit value by its entry. Formats that store a zero point z have offsets = -z * scales. Inputs may
be permuted (act-order): column j then belongs to input permutation[j]. The few weights of a row
that its scale does not reach are outliers: what they are beyond their values is added.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

KINDS = ("int8", "int4", "fp8")
BLOCK = 1 << 20  # elements that are dequantised at a time


@dataclass(frozen=True)
class Quantised:
    """A matrix [O, I] of few bits.

    kind: one of KINDS. values: int8 [O, I]; uint8 [O, I / 2] with the even column in the low four
    bits, 0 to 15; or float8_e4m3fn [O, I]. scales: floating point [O, ceil(I / group)]; offsets:
    the same shape, or None for zero. group: columns under one scale. permutation: int64 [I] or
    None. table: float32 [16], what 4-bit values stand for, or None for themselves. places,
    outliers: int32 and float32 [O, n], the columns of a row's outliers and what is added there,
    for int8 with one scale per row.
    """

    kind: str
    values: torch.Tensor
    scales: torch.Tensor
    group: int
    offsets: torch.Tensor | None = None
    permutation: torch.Tensor | None = None
    table: torch.Tensor | None = None
    places: torch.Tensor | None = None
    outliers: torch.Tensor | None = None

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
        """Whether a row has one scale and no offset: int8 as products of integers want it."""
        return self.kind == "int8" and self.offsets is None and self.scales.shape[1] == 1

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        parts = (getattr(self, field.name) for field in fields(self))
        return sum(t.numel() * t.element_size() for t in parts if isinstance(t, torch.Tensor))

    def to(self, device: torch.device | str) -> Quantised:
        """The same matrix on a device."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: Any = {n: t.to(device) for n, t in parts.items() if isinstance(t, torch.Tensor)}
        return replace(self, **moved)

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
        if self.places is not None and self.outliers is not None:
            out.scatter_add_(1, self.places[rows].long(), self.outliers[rows])
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
        sizes = [
            [None if t is None else t.shape[1] for t in (one.offsets, one.outliers)]
            for one in (first, other)
        ]
        if not alike or not same or sizes[0] != sizes[1]:
            return None

    def below(name: str) -> torch.Tensor | None:
        found = [getattr(part, name) for part in parts]
        return None if found[0] is None else torch.cat(found)

    whole: Any = {
        name: below(name) for name in ("values", "scales", "offsets", "places", "outliers")
    }
    return replace(first, **whole)
