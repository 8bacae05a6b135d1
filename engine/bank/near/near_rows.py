"""Rows of a layer some of whose K/V heads do without the K of distant tokens: V of every token, K
of every token in the other heads, and in these K of the first tokens and of a ring of the newest.

Position p of such a head lies in row p where p is below `first`, else in row first + (p - first) %
size: until the ring has been around once, a token's row is its position.
"""

from __future__ import annotations

import torch

from engine.base.errors import SettingError
from kernels.rows.forms import as_bytes, stored, stored_keys


class NearRows:
    """K and V of one layer of sequences of up to `capacity` tokens. near: the K/V heads, ascending,
    that hold `rows` rows of K: those of the first tokens and of a ring of the newest. k: K of the
    other heads [B, H', capacity, width]; v: V of all [B, Hkv, capacity, width]; ring: K of the near
    ones [B, H'', rows, width]. Widths as in Bank.widths.
    """

    def __init__(
        self,
        near: tuple[int, ...],
        first: int,
        recent: int,
        rows: int,
        shape: tuple[int, int, int, tuple[int, int]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        batch, heads, capacity, widths = shape
        self.near, self.first, self.recent = near, first, recent
        self.rows, self.size = rows, max(1, rows - first)
        self.whole = tuple(head for head in range(heads) if head not in near)
        # K/V head -> its number among those of its kind
        self.number = {h: i for kind in (self.whole, near) for i, h in enumerate(kind)}
        sizes = (
            (batch, len(self.whole), capacity, widths[0]),
            (batch, len(near), rows, widths[0]),
            (batch, heads, capacity, widths[1]),
        )
        self.k, self.ring, self.v = (
            torch.empty(size, dtype=dtype, device=device) for size in sizes
        )
        # on the device, so that no step brings them there
        self._whole, self._near = (
            torch.tensor(kind, dtype=torch.int64, device=device) for kind in (self.whole, near)
        )
        self.low, self._high = 0, 0  # the ring holds positions from `low` on, but for the first

    @property
    def nbytes(self) -> int:
        """Bytes of K and V."""
        return self.k.nbytes + self.ring.nbytes + self.v.nbytes

    # ---------------------------------------------------------------- writing

    def note(self, stop: int) -> None:
        """Note that positions below `stop` have been written."""
        self._high = max(self._high, stop)
        self.low = max(self.low, self._high - self.size) if self._high > self.rows else 0

    def write(
        self, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, backend: str
    ) -> None:
        """Store k, v [B, C, Hkv, D], floats or packed, at positions int64 [B, C], which go up by
        one; C is at most the ring's rows.
        """
        k, v = stored_keys(k, self.k, backend), stored(v, self.v, backend)
        ring = self._ring_rows(positions)
        batch = torch.arange(len(positions), device=positions.device).unsqueeze(1)
        for held, new, at in (
            (self.k, as_bytes(k).index_select(2, self._whole), positions),
            (self.ring, as_bytes(k).index_select(2, self._near), ring),
            (self.v, as_bytes(v), positions),
        ):
            as_bytes(held)[batch, :, at] = new.to(as_bytes(held).dtype)

    def _ring_rows(self, positions: torch.Tensor) -> torch.Tensor:
        """Rows of the ring that positions lie in."""
        newest = self.first + (positions - self.first) % self.size
        return torch.where(positions < self.first, positions, newest)

    # ---------------------------------------------------------------- reading

    def head_keys(self, head: int, first: int, stop: int) -> list[tuple[int, torch.Tensor]]:
        """Return [(first position, K [B, 1, n, width])] of a K/V head's positions first .. stop-1:
        views, two where they lie around the ring's end. Raises SettingError where some are gone.
        """
        at, stop = slice(self.number[head], self.number[head] + 1), max(first, stop)
        if head not in self.near:
            return [(first, self.k[:, at, first:stop])]
        if stop <= self.first or self._high <= self.rows:
            return [(first, self.ring[:, at, first:stop])]
        if first < max(self.low, self.first):
            raise gone(first, stop)
        parts: list[tuple[int, torch.Tensor]] = []
        row = self.first + (first - self.first) % self.size
        while first < stop or not parts:
            count = min(stop - first, self.rows - row)
            parts.append((first, self.ring[:, at, row : row + count]))
            first, row = first + count, self.first
        return parts

    def keys(self, first: int, stop: int) -> torch.Tensor:
        """Return K [B, Hkv, stop - first, width] of all heads. Raises as `head_keys`."""
        if not self.whole and (stop <= self.first or self._high <= self.rows):
            return self.ring[:, :, first:stop]
        heads = (self.head_keys(head, first, stop) for head in sorted(self.number))
        return torch.cat([torch.cat([part for _, part in parts], 2) for parts in heads], 1)

    def fitting(self, stop: int | None) -> int:
        """Return up to which of `stop` positions (None: all that there is room for) the near heads
        have K: all that are written, or as many as are asked for.
        """
        most = self.rows if self._high <= self.rows else self.v.shape[2]
        return most if stop is None else min(stop, most)

    # ---------------------------------------------------------------- going back, copies

    def holds(self, length: int, spare: int) -> bool:
        """Say whether a session of `length` tokens finds its newest tokens here, and `spare` before
        them.
        """
        oldest = max(0, length - self.recent - spare)
        return length == 0 or oldest >= self.low and length <= self._high

    def rewind(self, length: int) -> None:
        """Forget positions from `length` on. An empty session may begin anew."""
        if length == 0:
            self.low = self._high = 0

    def views(self, position: int) -> list[torch.Tensor]:
        """Return the views that hold one position's K and V."""
        row = position
        if position >= self.first:
            row = self.first + (position - self.first) % self.size
        held = ((self.k, position), (self.v, position), (self.ring, row))
        return [side[:, :, at : at + 1] for side, at in held]

    def load(self, k: torch.Tensor, v: torch.Tensor) -> None:
        """Hold rows K and V [B, Hkv, n, width] of positions 0 .. n-1, of which no query saw the
        near heads' K between the first and the newest ones.
        """
        n, first = k.shape[2], self.first
        as_bytes(self.k)[:, :, :n] = as_bytes(k).index_select(1, self._whole)
        self.v[:, :, :n] = v
        self.low = self._high = 0
        self.note(n)
        for low, stop in ((0, min(n, first)), (max(self.low, first), n)):
            rows = self._ring_rows(torch.arange(low, max(low, stop), device=k.device))
            new = as_bytes(k[:, :, low : max(low, stop)]).index_select(1, self._near)
            as_bytes(self.ring).index_copy_(2, rows, new)

    def copy_from(self, other: NearRows, length: int) -> None:
        """Hold what other rows of this layer hold of the first `length` tokens."""
        for mine, theirs in ((self.k, other.k), (self.v, other.v)):
            mine[:, :, :length] = theirs[:, :, :length]
        self.ring.copy_(other.ring)
        self.low, self._high = other.low, other._high


def gone(first: int, stop: int) -> SettingError:
    """The error for K that this bank does not hold."""
    return SettingError(
        f"forget: found K of positions {first} to {stop - 1} gone in some K/V heads, whose layers "
        "use the logits of a lower one; read the tokens again, or use forget=False"
    )
