"""What a method that reads whole blocks of host memory keeps of them on the device: a layer's first
tokens, and the blocks that it read last.

A read brings over the blocks that have no place yet, each as one run of rows; the least recently
read give theirs up (kernels/tier/lru_slots.py, whose tokens are blocks here). No index visits the
host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from engine.bank.host.host_rows import HostRows
from engine.bank.row_layout import RowLayout
from engine.plan.needs import BlockCache
from kernels.rows.forms import as_bytes
from kernels.tier.lru_slots import Slots, forget_slots, make_slots, plan_slots


class ReadsRows(Protocol):
    """What brings a layer's first tokens over (RowReader)."""

    def read(self, layer: int, first: int, stop: int, out: torch.Tensor) -> int:
        """Copy rows first .. stop-1 of a layer to out[0:]; bytes that came over the link."""
        ...


def counted(counters: Mapping[int, Sequence[int]]) -> dict[str, object]:
    """The part of SessionStats that Bank.counters makes, as keyword arguments."""
    names = ("hits", "misses", "evictions", "plans", "bytes")
    groups = {layer: dict(zip(names, row)) for layer, row in counters.items()}
    total = {name: sum(row[name] for row in groups.values()) for name in names}
    return dict(
        hits=total["hits"],
        misses=total["misses"],
        evictions=total["evictions"],
        hit_rate=total["hits"] / max(1, total["hits"] + total["misses"]),
        bytes_fetched=total["bytes"],
        groups=groups,
    )


class CachedBlocks:
    """rows [layers, first + held * size, elements]: of each of `layers` the first tokens, then
    `held` places for blocks of `size` tokens. Work is issued to the current stream; the caller has
    waited for the rows in host memory.
    """

    def __init__(
        self,
        layers: Sequence[int],
        cache: BlockCache,
        capacity: int,
        layout: RowLayout,
        host: HostRows,
        reader: ReadsRows,
    ) -> None:
        self.cache, self.streamed = cache, 0  # bytes of first tokens that came over
        self._at = {layer: i for i, layer in enumerate(layers)}
        self._layout, self._host, self._reader = layout, host, reader
        self._rows = layout.empty(len(layers), cache.first + cache.held * cache.size)
        self._slots: list[Slots] = [
            make_slots(cache.blocks(capacity), cache.held, cache.read, layout.device)
            for _ in layers
        ]
        # bytes of blocks that came over, per layer
        self._moved = torch.zeros(len(layers), dtype=torch.int64, device=layout.device)
        self._first = [0] * len(layers)  # of the first tokens those that are here

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._rows.nbytes + self._moved.nbytes + sum(s.nbytes for s in self._slots)

    def counters(self, layer: int) -> torch.Tensor:
        """Return int64 [5] on the device: hits, misses and evictions in blocks, reads, bytes."""
        at = self._at[layer]
        return torch.cat((self._slots[at].counters, self._moved[at : at + 1]))

    def read(self, layer: int, first: int, blocks: torch.Tensor) -> torch.Tensor:
        """Return copies [first + n * size, elements] of the rows of a layer's first tokens and of
        `blocks`, int [n] ascending, of which n is at most `read`.
        """
        at, cache, rows = self._at[layer], self.cache, as_bytes(self._rows[self._at[layer]])
        if first > self._first[at]:
            have = self._first[at]
            self.streamed += self._reader.read(layer, have, first, self._rows[at, have:])
            self._first[at] = first
        if not len(blocks):
            return rows[:first].clone().view(self._layout.dtype)
        slots = self._slots[at]
        count = torch.full((1,), len(blocks), dtype=torch.int32, device=blocks.device)
        plan_slots(blocks.int(), count, slots, self._host.backend)
        self._host.read(
            layer,
            self._spread(slots.source),
            self._rows[at],
            self._spread(slots.target),
            slots.misses * cache.size,
            self._moved[at : at + 1],
            self._host.pool.programs,
        )
        places = self._spread(slots.slot_of[: len(blocks)])
        index = torch.cat([torch.arange(first, dtype=torch.int32, device=places.device), places])
        return rows.index_select(0, index).view(self._layout.dtype)

    def _spread(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the tokens of blocks, or the rows of places: int32 [n] -> int32 [n * size]."""
        inside = torch.arange(self.cache.size, dtype=torch.int32, device=blocks.device)
        return (self.cache.first + blocks.unsqueeze(1) * self.cache.size + inside).flatten()

    def drop(self, layer: int, block: torch.Tensor) -> None:
        """Drop a block int64 [1], which has other rows from now on."""
        slots = self._slots[self._at[layer]]
        slots.token_slot.index_fill_(0, block, -1)
        slots.slot_token.masked_fill_(slots.slot_token == block, -1)

    def forget(self, length: int) -> None:
        """Drop what holds tokens from `length` on; 0 empties it."""
        whole = max(0, length - self.cache.first) // self.cache.size
        self._first = [min(length, known) for known in self._first]
        for slots in self._slots:
            forget_slots(slots, whole)

    def close(self) -> None:
        """Give the rows back."""
        self._rows, self._slots = self._rows[:0], []
