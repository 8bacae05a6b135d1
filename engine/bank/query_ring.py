"""The newest queries of every layer before rotation, kept under every method, so that switching
methods and resuming work with windowed selectors.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.model.config.config import ModelConfig
from engine.plan.needs import MOST_WINDOW, RING

# Slots: a step may write up to 8 tokens of which only the first are kept (exact mode's drafts); the
# RING queries before them must survive.
SLOTS = RING + 8


class QueryRing:
    """The newest RING pre-RoPE queries of every layer, position p in slot p % SLOTS.

    slots [attending layers, B, SLOTS, H, D]; `of` finds a layer's, whose heads may be narrower.
    Positions low .. high-1 are valid; other slots hold stale data.
    changes: counts what was written or taken back otherwise than by a step. kept: {length: the
    newest queries there, as `newest` gives them}, which come back where the ring is cut to that
    length. parts: of each part of a model over several devices.
    """

    parts: tuple[QueryRing, ...] = ()

    def __init__(
        self, config: ModelConfig, batch: int, dtype: torch.dtype, device: torch.device | str
    ):
        attending = config.attending_layers
        self._number = {layer: i for i, layer in enumerate(attending)}
        self._widths = [config.heads_of(layer)[1] for layer in attending]
        shape = (len(attending), batch, SLOTS, config.num_heads, max(self._widths))
        self.slots = torch.zeros(shape, dtype=dtype, device=device)
        self.low = self.high = self.changes = 0
        self.kept: dict[int, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.slots.numel() * self.slots.element_size()

    def of(self, layer: int) -> torch.Tensor:
        """The slots of a layer that attends, [B, SLOTS, H, D]: a view."""
        number = self._number[layer]
        return self.slots[number, ..., : self._widths[number]]

    def write(self, layer: int, queries: torch.Tensor, positions: torch.Tensor) -> None:
        """Store queries [B, Q, H, D] of a step at positions [B, Q] int64."""
        rows = torch.arange(len(queries), device=queries.device).unsqueeze(1)
        self.of(layer).index_put_((rows, positions % SLOTS), queries)

    def write_chunk(self, newest: torch.Tensor, stop: int) -> None:
        """Store newest [layers, B, W, H, D]: the last W queries of a chunk that ended at `stop`.
        All layers at once, after the chunk: an interrupted chunk stores none.
        """
        self.changes += 1
        width = newest.shape[2]
        where = torch.arange(stop - width, stop, device=newest.device) % SLOTS
        self.slots.index_copy_(2, where, newest)

    @property
    def kept_bytes(self) -> int:
        """Bytes of queries that are kept for going back."""
        return sum(queries.nbytes for queries in self.kept.values())

    def reserve(self, stop: int) -> None:
        """Invalidate the positions whose slots are about to be written, up to position `stop`: a
        chunk or step may break off between writing and `extend`.
        """
        self.low = max(self.low, stop - RING)

    def newest(self, most: int = MOST_WINDOW) -> torch.Tensor:
        """A copy of the newest queries, at most `most`: [layers, B, W, H, D], as `write_chunk`
        takes them.
        """
        first = max(self.low, self.high - most)
        where = torch.arange(first, self.high, device=self.slots.device) % SLOTS
        return self.slots.index_select(2, where)

    def as_one(self, newest: torch.Tensor) -> torch.Tensor:
        """What `newest` gave as one tensor, on the CPU or where the ring is."""
        return newest

    def taken(self, queries: torch.Tensor) -> torch.Tensor:
        """Queries of a file as `write_chunk` takes them."""
        return queries.to(self.slots)

    def extend(self, length: int, count: int) -> None:
        """Mark the `count` queries that end at `length` as valid. They extend the valid range, or
        begin a new one after a gap.
        """
        first = length - count
        self.low = max(self.low if self.low <= first <= self.high else first, length - RING)
        self.high = length

    def keep(self) -> None:
        """Keep the newest queries for a `truncate` to this length: full attention would not compute
        them again.
        """
        if self.low < self.high:
            self.kept = {**self.kept, self.high: self.newest()}

    def keep_at(self, lengths: Iterable[int]) -> None:
        """Keep the queries of these lengths, of those that are kept."""
        self.kept = {length: self.kept[length] for length in lengths if length in self.kept}

    def truncate(self, length: int) -> None:
        """Invalidate positions >= length; bring back what was kept there. Other slots keep stale
        data.
        """
        self.changes += 1
        self.high = min(self.high, length)
        self.low = min(self.low, self.high)
        self.kept = {stop: queries for stop, queries in self.kept.items() if stop <= length}
        queries = self.kept.get(length)
        if queries is not None and not self.covers(length - queries.shape[2], length):
            self.write_chunk(queries, length)
            self.set_valid(length - queries.shape[2], length)

    def set_valid(self, start: int, stop: int) -> None:
        """Mark exactly positions start .. stop-1 as valid (none where they are equal)."""
        self.changes += 1
        self.low, self.high = start, stop

    def covers(self, start: int, stop: int) -> bool:
        """Whether positions start .. stop-1 are valid."""
        return start >= stop or (self.low <= start and stop <= self.high)

    def copy_from(self, other: QueryRing) -> None:
        """Hold what another ring of the same model holds (fork)."""
        self.slots.copy_(other.slots)
        self.low, self.high, self.kept = other.low, other.high, dict(other.kept)

    def read(self, layer: int, positions: torch.Tensor) -> torch.Tensor:
        """Queries [B, W, H, D] at positions [B, W] int64."""
        slots = self.of(layer)
        rows = torch.arange(slots.shape[0], device=slots.device).unsqueeze(1)
        return slots[rows, positions % SLOTS]
