"""The store of an evicting method: K and V that it has kept, really copied, so that what it claims
to hold is what is allocated.

A layer's store is a list of `Rows`, one per run of K/V heads that keep equally many tokens (one for
all heads, or one per head where budgets differ, as in Ada-KV: engine/methods/evict/shared/ragged.py
has those in one run). With `forget` it is all that there is of
K and V; else the session's bank stays beside it, unread, so that the session can go back and go on
under another method. `resident` is the store.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from engine.model.config.config import ModelConfig
from kernels.kept.step import Store
from kernels.native.own_pages import copied, empty
from kernels.rows.forms import as_bytes
from kernels.select.drop import NEWEST, Steady, drop_least

# rows by which a store grows: copying it every 16 steps costs an eighth of reading it; small beside
# 3% of a short text
ROOM = 16


def reserved(base: int, held: int, most: int | None = None) -> int:
    """Rows of a store that held `base` tokens when it was made and holds `held` now: whole ROOMs on
    top of base, always with room for one more token, at most `most` (None: no limit).
    """
    rows = base + -(-(held - base + 1) // ROOM) * ROOM
    return rows if most is None else max(held + 1, min(rows, most))


def row_bytes(config: ModelConfig, itemsize: int, scores: int) -> int:
    """Bytes of one retained token in one K/V head: K, V, position (int32), and float32 scores."""
    row = config.kv_bytes(itemsize) // config.num_kv_heads
    return row + 4 + 4 * scores


class Part(NamedTuple):
    """What some K/V heads of a layer attend to: k, v [h, T, D], positions int32 [h, T], scores
    float32 [h, G, T] or None. heads: slice of the layer's K/V heads.
    """

    heads: slice
    k: torch.Tensor
    v: torch.Tensor
    positions: torch.Tensor
    scores: torch.Tensor | None

    def head(self, i: int) -> Part:
        """The part of its i-th K/V head."""
        one, at = slice(i, i + 1), self.heads.start + i
        scores = None if self.scores is None else self.scores[one]
        return Part(slice(at, at + 1), self.k[one], self.v[one], self.positions[one], scores)


@dataclass
class Sequence:
    """What one sequence of a runtime has retained.

    length: tokens so far. since: first position that is in the bank only (a prompt under way).
    prompt: length at the end of the latest prefill. layers: per layer its list of Rows; None while
    everything is in the bank. budgets: per layer. sums: per layer the scores [Hkv, G, T] of
    everything that is attended to while a prompt is read or nothing is cut yet.
    """

    length: int = 0
    since: int = 0
    prompt: int = 0
    layers: list[list[Rows]] | None = None
    budgets: list[int] = field(default_factory=list)
    sums: list[torch.Tensor] | None = None

    def keep_sums(self, sums: list[torch.Tensor]) -> None:
        """Take these scores, all layers at once: an interrupt leaves the old ones."""
        self.sums = sums

    def read_to(self, length: int, budgets: list[int]) -> None:
        """Note a prompt's end and the budgets of the answer that follows."""
        self.length = self.prompt = length
        self.budgets = budgets

    def keep(self, layers: list[list[Rows]]) -> None:
        """Take a store made of all tokens so far, in which their scores are."""
        self.layers, self.since, self.sums = layers, self.length, None

    def keep_read(self, layers: list[list[Rows]], since: int) -> None:
        """Take the store of a prompt under way, which has the tokens before `since`."""
        self.layers, self.since = layers, since

    def replace(self, layer: int, parts: list[Rows]) -> None:
        """Take a layer's new store while the others' are made: the old one is freed."""
        if self.layers is not None:
            self.layers[layer] = parts

    def lengthen(self, count: int) -> None:
        """Count tokens that were read or written."""
        self.length += count

    def allot(self, budgets: list[int]) -> None:
        """Set the budgets of a session whose prompt had no end."""
        self.budgets = budgets

    def stored(self) -> None:
        """Note that every token so far is in the store."""
        self.since = self.length

    def positions(
        self, layer: int, number: int, held: int, heads: int, device: torch.device
    ) -> torch.Tensor:
        """Positions int32 [heads, T] of what part `number` of a layer attends to: `held` tokens of
        its store, then those that are in the bank only.
        """
        fresh = torch.arange(self.since, self.length, dtype=torch.int32, device=device)
        fresh = fresh.expand(heads, -1)
        if not held:
            return fresh
        assert self.layers is not None
        return torch.cat([self.layers[layer][number].positions[:, :held], fresh], 1)


class Rows:
    """What h K/V heads of one sequence and layer have kept: k, v [h, R, D], positions [h, R] int32,
    scores [h, G, R] float32 or None.

    heads: slice of the layer's K/V heads; the first `held` rows count; base: `held` when the store
    was made.
    """

    def __init__(
        self,
        heads: slice,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor,
        scores: torch.Tensor | None,
        held: int,
        base: int | None = None,
    ):
        self.heads, self.k, self.v = heads, k, v
        self.positions, self.scores = positions, scores
        self.held, self.base = held, held if base is None else base

    @classmethod
    def empty(cls, part: Part, held: int, size: int, base: int | None = None) -> Rows:
        """Room for `size` rows of a part's heads, `held` of which are about to be written."""
        scores = part.scores
        return cls(
            part.heads,
            empty((len(part.k), size, part.k.shape[2]), part.k),
            empty((len(part.v), size, part.v.shape[2]), part.v),
            empty((len(part.positions), size), part.positions),
            None if scores is None else empty((*scores.shape[:2], size), scores).zero_(),
            held,
            base,
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V."""
        return self.k.nbytes + self.v.nbytes

    @property
    def nbytes(self) -> int:
        """Bytes held: K and V, positions, scores."""
        return self.kv_bytes + sum(
            t.numel() * t.element_size() for t in (self.positions, self.scores) if t is not None
        )

    def kv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [h, held, D]."""
        return self.k[:, : self.held], self.v[:, : self.held]

    def part(self) -> Part:
        """The rows that count, as a Part."""
        scores = None if self.scores is None else self.scores[:, :, : self.held]
        return Part(self.heads, *self.kv(), self.positions[:, : self.held], scores)

    @classmethod
    def gather(cls, part: Part, index: torch.Tensor, most: int | None = None) -> Rows:
        """New Rows from those of a part at index [h, n] int64."""
        count, wide = index.shape[1], index.unsqueeze(-1)
        found = cls.empty(part, count, reserved(count, count, most))
        for mine, theirs in ((found.k, part.k), (found.v, part.v)):
            gathered(theirs, wide, mine[:, :count])
        found.positions[:, :count] = part.positions.gather(1, index)
        if part.scores is not None and found.scores is not None:
            groups = index.unsqueeze(1).expand(-1, part.scores.shape[1], -1)
            found.scores[:, :, :count] = part.scores.gather(2, groups)
        return found

    @classmethod
    def copied(cls, part: Part, goal: int) -> Rows:
        """New Rows of all of a part, with the room of a store that was made with `goal` rows."""
        count = part.k.shape[1]
        found = cls.empty(part, count, reserved(goal, goal), goal)
        pairs = (found.k, part.k), (found.v, part.v), (found.positions, part.positions)
        for mine, theirs in pairs:
            mine[:, :count] = theirs
        return found

    def count_written(self, part: Part, goal: int) -> bool:
        """Count the rows of a part that was written behind those held, in this very store, as if it
        had been made with `goal` rows; False where it was not, or room is for another number.
        """
        here = self.k.data_ptr() == part.k.data_ptr() and self.v.data_ptr() == part.v.data_ptr()
        if not here or self.k.shape[1] != reserved(goal, goal):
            return False
        self.held, self.base = part.k.shape[1], goal
        self.positions[:, : self.held] = part.positions
        return True

    def store(self) -> Store:
        """The whole of it, as a step in one call takes it."""
        return Store(self.k, self.v, self.positions, self.scores, self.held)

    def put(self, k: torch.Tensor, v: torch.Tensor, position: int) -> None:
        """Write a new token's k, v [h, D] behind the others; it counts once `held` says so."""
        self.k[:, self.held], self.v[:, self.held] = k, v
        self.positions[:, self.held] = position
        if self.scores is not None:
            self.scores[:, :, self.held] = 0.0

    def make_room(self, most: int | None = None) -> None:
        """Grow so that one more token can be put."""
        more = reserved(self.base, self.held, most) - self.positions.shape[1]
        if more > 0:
            self.k, self.v, self.positions = (
                torch.cat([t, t.new_zeros(len(t), more, *t.shape[2:])], 1)
                for t in (self.k, self.v, self.positions)
            )
            if self.scores is not None:
                added = self.scores.new_zeros(*self.scores.shape[:2], more)
                self.scores = torch.cat([self.scores, added], 2)

    def drop_least(
        self,
        backend: str,
        how: str = "max",
        keep_below: int = 0,
        keep_from: int = NEWEST,
        ranks: torch.Tensor | None = None,
        steady: Steady | None = None,
    ) -> None:
        """Forget one row per head, of the least score or rank (kernels/select/drop.py)."""
        store = self.k, self.v, self.positions, self.scores
        drop_least(*store, self.held, how, keep_below, keep_from, backend, ranks, steady)
        self.held -= 1

    def state(self, rows: bool) -> Any:
        """(first head, one past the last, positions [h, held], scores or None, base, (k, v) or
        None): what `rebuild` needs. rows: K and V too, which no bank holds.
        """
        scores = None if self.scores is None else copied(self.scores[:, :, : self.held])
        kv = tuple(copied(side) for side in self.kv()) if rows else None
        heads = self.heads.start, self.heads.stop
        return *heads, copied(self.positions[:, : self.held]), scores, self.base, kv

    def count(self) -> Any:
        """A `state` of the number of rows alone: for `first` to go back by, while this store grows
        and none of these rows changes.
        """
        return self.heads.start, self.heads.stop, self.held, None, self.base, None

    def first(self, state: Any) -> Rows:
        """These Rows as they were at a `count`, in the same memory."""
        _, _, held, _, base, _ = state
        if held > self.held:
            raise ValueError("held")
        return Rows(self.heads, self.k, self.v, self.positions, self.scores, held, base)

    @classmethod
    def rebuild(
        cls, state: Any, bank_kv: Callable[[], tuple[torch.Tensor, torch.Tensor]], most: int | None
    ) -> Rows:
        """The Rows of a state, bit for bit; bank_kv gives the bank's k, v [Hkv, T, D] of that layer
        where the state has none.
        """
        first, stop, positions, scores, base, kv = state
        count, heads = positions.shape[1], slice(first, stop)
        if kv is None:
            index = positions.long().unsqueeze(-1)
            kv = tuple(gathered(side[heads], index) for side in bank_kv())
        k, v = kv
        found = cls.empty(
            Part(heads, k, v, positions, scores), count, reserved(base, count, most), base
        )
        for mine, theirs in ((found.k, k), (found.v, v), (found.positions, positions)):
            mine[:, :count] = theirs
        if found.scores is not None:
            found.scores[:, :, :count] = scores
        return found

    def clone(self) -> Rows:
        """A copy that shares nothing."""
        scores = None if self.scores is None else copied(self.scores)
        tensors = copied(self.k), copied(self.v), copied(self.positions)
        return Rows(self.heads, *tensors, scores, self.held, self.base)


def gathered(
    rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The rows [h, n, D] of rows [h, T, D] at index [h, n, 1]; out: where to. On a CPU head by
    head: torch's gather makes an index as large as twice the rows, in the heap, and takes 16 times
    as long (3.4 ms for 0.21, of 4 heads' 4,096 rows).
    """
    if rows.device.type != "cpu":
        given = as_bytes(rows), 1, index.expand(-1, -1, rows.shape[2])
        found = torch.gather(*given, out=None if out is None else as_bytes(out))
        return found.view(rows.dtype)
    if out is None:
        out = empty((len(rows), index.shape[1], rows.shape[2]), rows)
    for mine, theirs, at in zip(as_bytes(out), as_bytes(rows), index[..., 0]):
        torch.index_select(theirs, 0, at, out=mine)
    return out


def best(scores: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """Indices int64 [h, count] of the largest scores [h, T], ascending by position [h, T]; of equal
    scores the newer token's wins.
    """
    newest = torch.argsort(positions, dim=1, descending=True)
    order = torch.sort(scores.gather(1, newest), dim=1, descending=True, stable=True).indices
    chosen = newest.gather(1, order[:, :count])
    return chosen.gather(1, torch.argsort(positions.gather(1, chosen), dim=1))


def rounded(wanted: list[float], total: int, most: list[int]) -> list[int]:
    """Whole numbers of this total beside the wanted ones, at most `most` each: the largest
    remainders go up.
    """
    counts = [int(w) for w in wanted]
    for i in sorted(range(len(counts)), key=lambda i: (counts[i] - wanted[i], i)) * 2:
        if sum(counts) < total and counts[i] < most[i]:
            counts[i] += 1
    return counts
