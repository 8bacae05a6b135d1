"""A run of rows in which some K/V heads keep every token and the others the first, the newest, and
one row for all that they have dropped: the mean of those K and of those V, which the softmax counts
as often as there were tokens.

What a step pushes out of a head of few tokens joins its mean when the step is counted, for all such
heads of a layer at once, and the new row takes its place: of a full head nothing moves or grows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from engine.methods.base import Setup
from engine.methods.evict.shared.ragged import TABLES, Ragged
from engine.methods.evict.shared.store import Rows, reserved
from kernels.attention.ragged import decode_ragged
from kernels.native.own_pages import empty
from kernels.rows.forms import as_bytes, floats, key_floats, stored, stored_keys

BLOCK = 8192  # rows that are floats at a time while they are added up
NOWHERE = -1  # position of a mean


@dataclass
class Dropped:
    """What the heads of few tokens of one layer have dropped, equally many tokens each. sums:
    float32 [heads, 2, D], of K and of V.
    """

    sums: torch.Tensor
    count: int = 0

    @classmethod
    def nothing(cls, heads: int, dim: int, device: torch.device) -> Dropped:
        """Sums of no token."""
        return cls(torch.zeros(heads, 2, dim, device=device))

    def clone(self) -> Dropped:
        """A copy that shares nothing."""
        return Dropped(self.sums.clone(), self.count)

    def with_rows(self, heads: slice, k: torch.Tensor, v: torch.Tensor) -> None:
        """Add rows k, v [h, n, D] of some of the heads to their sums; `count` is the caller's."""
        for at in range(0, k.shape[1], BLOCK):
            rows = slice(at, at + BLOCK)
            self.sums[heads, 0] += key_floats(k[:, rows]).sum(1)
            self.sums[heads, 1] += floats(v[:, rows]).sum(1)


class MeanRows(Rows):
    """Rows of one head whose first row of k and v is the mean, which is no token's; positions are
    of the others.
    """

    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [1, held, D] of the tokens."""
        return self.k[:, 1 : self.held + 1], self.v[:, 1 : self.held + 1]


class Compensated(Ragged):
    """A layer's parts, one K/V head each. whole: whether a head keeps every token; sinks: first
    tokens that the others keep; full: tokens that one of those holds between steps, at most.

    logs float32 [N]: of the rows, how often they count; None where every head is whole. means,
    ring int64 [few]: where each mean lies, and the first of the rows that take turns.
    """

    plain = False

    def __init__(
        self,
        parts: Iterable[Rows],
        whole: Sequence[bool],
        dropped: Dropped,
        sinks: int,
        full: int,
        turn: int | None = None,
    ):
        list.__init__(self)
        old, self.whole, self.sinks, self.full = list(parts), tuple(whole), sinks, full
        self.dropped, first, at = dropped.clone(), old[0], 0
        self.begins: list[int] = []
        for rows, every in zip(old, self.whole):
            self.begins.append(at)
            at += self._size(rows, every)
        self.k, self.v = (empty((at, t.shape[2]), t) for t in (first.k, first.v))
        for t in (self.k, self.v):
            as_bytes(t).zero_()
        self.positions = first.positions.new_full((at,), NOWHERE)
        for rows, every, begin, end in zip(old, self.whole, self.begins, [*self.begins[1:], at]):
            kind, skip = (Rows, 0) if every else (MeanRows, 1)
            own = self.k[None, begin:end], self.v[None, begin:end]
            positions = self.positions[None, begin + skip : end]
            mine = kind(rows.heads, *own, positions, None, rows.held, rows.base)
            for new, kept in zip((*mine.kv(), mine.positions), (*rows.kv(), rows.positions)):
                new[:, : rows.held] = kept[:, : rows.held]
            self.append(mine)
        self._lay(first.k.device, turn)

    def _size(self, rows: Rows, every: bool) -> int:
        """Rows of a head's span."""
        if every:
            return reserved(rows.base, rows.held)
        return 1 + reserved(rows.base, rows.held, self.full + 1)

    def _lay(self, device: torch.device, turn: int | None) -> None:
        """Make the tables anew. turn: which row of the ring is the oldest; None: look."""
        self.few = [i for i, every in enumerate(self.whole) if not every]
        held = self[self.few[0]].held if self.few else 0
        # those whose rows take turns stay as they are
        self.turns = bool(self.few) and held == self.full
        hidden = 1 if self.dropped.count == 0 else 0
        table, growing, self.most, self.spare = [], [], 0, 1 << 62
        for rows, every, begin in zip(self, self.whole, self.begins):
            skip = 0 if every else 1
            seen = rows.held + 1 + (0 if every else 1 - hidden)
            start, slot = begin + (0 if every else hidden), begin + skip + rows.held
            table.append((start, seen, slot))
            growing.append(int(every or not self.turns))
            self.most = max(self.most, seen)
            if growing[-1]:
                self.spare = min(self.spare, len(rows.positions[0]) - rows.held)
        self.grows = any(growing)
        own = [(self.begins[i], self.begins[i] + 1 + self.sinks, table[i][2]) for i in self.few]
        columns = [list(column) for column in zip(*table)] + [growing]
        self.table = torch.tensor(columns, dtype=torch.int64, device=device)
        self.starts, self.seen, self.slots = self.table[:TABLES].unbind()
        self.growing = self.table[TABLES]
        places = [list(column) for column in zip(*own)] if own else [[], [], []]
        self.places = torch.tensor(places, dtype=torch.int64, device=device)
        self.means, self.ring, self.newest = self.places.unbind()
        self.turn = (self._oldest() if self.turns else 0) if turn is None else turn
        self.logs = torch.zeros(len(self.k), device=device) if self.few else None
        if self.dropped.count:
            self._write_means()

    def _oldest(self) -> int:
        """Which row of the ring holds the oldest token."""
        rows = self[self.few[0]]
        ring = rows.positions[0, self.sinks : rows.held]
        return int(ring.argmin()) if len(ring) else 0

    @property
    def nbytes(self) -> int:
        """Bytes of everything that the layer holds."""
        tensors = (self.k, self.v, self.positions, self.table, self.places)
        logs = 0 if self.logs is None else self.logs.nbytes
        return sum(t.nbytes for t in tensors) + self.dropped.sums.nbytes + logs

    @property
    def often(self) -> float:
        """Log of how many tokens a mean stands for."""
        return math.log(self.dropped.count)

    def mean(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 k, v [D] of the mean of head `number`, as a step reads them."""
        row = slice(self.begins[number], self.begins[number] + 1)
        return key_floats(self.k[row])[0], floats(self.v[row])[0]

    def attend(self, q: torch.Tensor, scale: float, setup: Setup) -> torch.Tensor:
        """Attention of one query [1, 1, H, D] to every head's rows, the one just put included."""
        rows = self.k, self.v, self.starts, self.seen, self.most
        return decode_ragged(q, *rows, scale, setup.scratch, setup.backend, self.logs)

    def remade(self) -> Compensated:
        """A copy that shares nothing, with room for what comes."""
        turn = self.turn if self.turns else None
        return Compensated(self, self.whole, self.dropped, self.sinks, self.full, turn)

    def counted(self) -> Compensated:
        """Count the rows that were put; of a full head the oldest joins its mean, and the new one
        takes its place. Returns this store, or a larger one where a head has no room.
        """
        for rows, every in zip(self, self.whole):
            rows.held += every or not self.turns
        self.table[1:TABLES] += self.growing
        if self.grows:
            self.most, self.spare = self.most + 1, self.spare - 1
        if self.turns:
            first = self.dropped.count == 0
            self._drop()
            if first:
                self._lay(self.k.device, self.turn)
        elif self.few and self[self.few[0]].held == self.full:
            self._lay(self.k.device, 0)  # in order so far
        return self if self.spare else self.remade()

    def _drop(self) -> None:
        ring = self.full - self.sinks
        leaves = self.ring + self.turn if ring else self.newest
        k, v = (t.index_select(0, leaves) for t in (as_bytes(self.k), as_bytes(self.v)))
        rows = k.view(self.k.dtype)[:, None], v.view(self.v.dtype)[:, None]
        self.dropped.with_rows(slice(None), *rows)
        self.dropped.count += 1
        for t in (as_bytes(self.k), as_bytes(self.v), self.positions):
            t.index_copy_(0, leaves, t.index_select(0, self.newest))
        self.turn = (self.turn + 1) % ring if ring else 0
        self._write_means()

    def _write_means(self) -> None:
        """The means of the sums, in the form of the rows, and how often they count."""
        assert self.logs is not None
        k, v = (self.dropped.sums / self.dropped.count).unbind(1)
        rows = stored_keys(k, self.k), stored(v, self.v)
        for mine, new in zip((self.k, self.v), rows):
            as_bytes(mine).index_copy_(0, self.means, as_bytes(new.to(mine.dtype)))
        self.logs.index_fill_(0, self.means, self.often)
