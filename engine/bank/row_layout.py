"""How one layer's K and V of a token lie in a row: K of every head, V of every head, padding.

Host memory, staging buffers, stream blocks and working sets all hold such rows, so that a transfer
is a plain copy. The padding makes a row whole host sectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.plan.placement import value_span
from kernels.rows.forms import stored, stored_keys


@dataclass(frozen=True)
class RowLayout:
    """Sizes of a row, and the device on which buffers of rows are made. widths: elements of one
    head's K, and of its V; 0: V is K, and its views are those of K. part_bytes: bytes of a row,
    padding included (engine.plan.placement.part_bytes).
    """

    kv_heads: int
    widths: tuple[int, int]
    part_bytes: int
    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> torch.Tensor:
        """Make a buffer of rows on the device: [*shape, elements of a row]."""
        elements = self.part_bytes // self.dtype.itemsize
        return torch.empty(*shape, elements, dtype=self.dtype, device=self.device)

    def views(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V [1, Hkv, T, D] as views of rows [T, elements]."""
        k, v = (part.unflatten(1, (self.kv_heads, -1)) for part in self._parts(rows))
        return k.transpose(0, 1)[None], v.transpose(0, 1)[None]

    @property
    def value_span(self) -> tuple[int, int]:
        """(first byte, bytes) of a row that are read for its V alone."""
        return value_span(*(self.kv_heads * width * self.dtype.itemsize for width in self.widths))

    def empty_values(self, count: int) -> torch.Tensor:
        """Make a buffer for `value_span` of rows: [count, elements]."""
        elements = self.value_span[1] // self.dtype.itemsize
        return torch.empty(count, elements, dtype=self.dtype, device=self.device)

    def values(self, rows: torch.Tensor) -> torch.Tensor:
        """Return V [Hkv, T, D] as a view of rows [T, elements] of `empty_values`."""
        k, v = (self.kv_heads * width for width in self.widths)
        first = k - self.value_span[0] // self.dtype.itemsize
        return rows[:, first : first + v].unflatten(1, (self.kv_heads, -1)).transpose(0, 1)

    def fill(
        self, rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor, backend: str = "auto"
    ) -> None:
        """Write k, v [T, Hkv, D], floats or packed, into rows [T, elements]. backend: as in
        Bank.write_chunk.
        """
        part_k, part_v = self._parts(rows)
        part_k.copy_(stored_keys(k, rows, backend).flatten(1))
        if self.widths[1]:
            part_v.copy_(stored(v, rows, backend).flatten(1))

    def _parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (self.kv_heads * width for width in self.widths)
        return rows[:, :k], rows[:, k : k + v] if v else rows[:, :k]
