"""The rows of a sliding-window layer: a ring of its window, of a chunk, and of some steps back.

Position p lies in ring rows p % size and p % size + size, so that any `size` consecutive positions
are consecutive rows and no kernel needs to know of a ring. Rows beyond the window are why a chunk
that breaks off, or a truncate by fewer tokens, finds the window before it untouched.
"""

from __future__ import annotations

import torch

from engine.model.config.config import ModelConfig
from engine.plan.needs import RING
from engine.plan.placement import ring_size
from kernels.rows.forms import row_widths, stored, stored_keys

DEFAULT_CHUNK = 2048  # of a bank that is made without a session


class WindowRing:
    """K and V of one layer's newest tokens: [B, Hkv, 2 * size, width] elements each, width as in
    Bank.widths.

    window: tokens that a query sees, its own included. Positions from `low` on are held; those of
    older tokens have been overwritten.
    """

    def __init__(
        self,
        window: int,
        size: int,
        shape: tuple[int, int, tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        batch, kv_heads, widths = shape
        self.window, self.size, self.low, self._high = window, size, 0, 0
        self.k, self.v = (
            torch.empty(batch, kv_heads, 2 * size, width, dtype=dtype, device=device)
            for width in widths
        )

    @property
    def nbytes(self) -> int:
        """Bytes of K and V."""
        return self.k.nbytes + self.v.nbytes

    def write_chunk(
        self, k: torch.Tensor, v: torch.Tensor, start: int, backend: str = "auto"
    ) -> None:
        """Store k, v [B, C, Hkv, D] at positions start .. start+C-1; C is at most `size`. backend:
        as in Bank.write_chunk.
        """
        first, stop = start, start + k.shape[1]
        self.note(stop)
        while first < stop:
            # up to the ring's end, then from its beginning
            count, at = min(stop - first, self.size - first % self.size), first % self.size
            part = slice(first - start, first - start + count)
            rows = stored_keys(k[:, part], self.k, backend), stored(v[:, part], self.v, backend)
            for held, new in zip((self.k, self.v), rows):
                for copy in (at, at + self.size):
                    held[:, :, copy : copy + count] = new.transpose(1, 2)
            first += count

    def note(self, stop: int) -> None:
        """Note that positions below `stop` have been written."""
        self._high = max(self._high, stop)
        self.low = max(self.low, self._high - self.size)

    def views(self, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V [B, Hkv, stop - first, D] of positions first .. stop-1: views."""
        at = slice(first % self.size, first % self.size + stop - first)
        return self.k[:, :, at], self.v[:, :, at]

    def rows_of(self, position: int) -> list[torch.Tensor]:
        """Return the views that hold one position's K and V, both copies."""
        at = position % self.size
        rows = (at, at + self.size)
        return [side[:, :, row : row + 1] for row in rows for side in (self.k, self.v)]

    def holds(self, length: int) -> bool:
        """Say whether a session of `length` tokens finds its window here, and RING before it."""
        return (
            length == 0 or max(0, length - self.window - RING) >= self.low and length <= self._high
        )

    def rewind(self, length: int) -> None:
        """Forget positions from `length` on. An empty session may begin anew."""
        if length == 0:
            self.low = self._high = 0

    def copy_from(self, other: WindowRing, length: int) -> None:
        """Hold what another ring of this layer holds of the first `length` tokens."""
        first = max(other.low, length - self.size, 0)
        k, v = (rows.clone() for rows in other.views(first, length))
        self.load(k, v, first, length)

    def load(self, k: torch.Tensor, v: torch.Tensor, low: int, length: int) -> None:
        """Hold the newest of k and v [B, Hkv, length - low, width], which are those of positions
        low .. length-1.
        """
        first = max(low, length - self.size, 0)
        self.low = self._high = first
        k, v = (rows[:, :, first - low :].transpose(1, 2) for rows in (k, v))
        self.write_chunk(k, v, first)
        self.low = first


def window_rings(
    config: ModelConfig,
    chunk: int,
    capacity: int,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[int, WindowRing]:
    """Return {sliding-window layer that writes rows: its ring} for sequences of `capacity` tokens,
    read in chunks of up to `chunk`. dtype: of rows.
    """
    found = {}
    for layer in config.ring_layers:
        heads, head_dim = config.heads_of(layer)
        window, shape = config.windows[layer], (batch, heads, row_widths(head_dim, dtype))
        size = ring_size(window, chunk, capacity)
        found[layer] = WindowRing(window, size, shape, dtype, device)
    return found
