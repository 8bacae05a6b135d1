"""Whole offloaded layers on the device, for methods that know nothing of tiers.

Brutal offload starts the copy of a layer some layers ahead of its use, into staging buffers of the
full capacity. Any other method asks for a layer, or a part of it, and waits. Rows can also be
gathered by a selection that was not fetched: one per head, or the ablation without packed fetches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from engine.bank.base import SparseRows, of_heads, own_rows
from engine.bank.host.block_stream import BlockStream
from engine.bank.host.row_reader import RowReader
from engine.bank.host.streams import SideStream, wait
from engine.bank.host.write_back import WriteBack
from engine.bank.row_layout import RowLayout


class GroupRows(NamedTuple):
    """Rows of an offload group that came in one copy. rows [n + tail, layers, elements], of which
    the first `old` of a layer are there, and the others when it asks: they are in its ring. tokens
    int32: all their positions; where int32 [1, h, K]: the rows of a choice, before row `first`.
    arrived: behind the copy.
    """

    rows: torch.Tensor
    old: int
    tokens: torch.Tensor
    where: torch.Tensor
    first: int
    arrived: torch.cuda.Event | None


class WholeLayers:
    """`count` staging buffers of `capacity` rows, filled on `stream`, and a spare one of `spare`
    rows that grows with the longest part of a layer read without staging.
    """

    def __init__(
        self,
        reader: RowReader,
        writer: WriteBack,
        blocks: BlockStream,
        layout: RowLayout,
        layers: Sequence[int],
        count: int,
        capacity: int,
        stream: SideStream,
        spare: int = 0,
    ) -> None:
        self.streamed = 0  # bytes read from host memory
        self.staged: dict[int, tuple[torch.Tensor, torch.cuda.Event | None]] = {}
        self._brought: dict[int, tuple[int, GroupRows]] = {}
        self.buffers = [layout.empty(capacity) for _ in range(count)]
        self._reader, self._writer, self._blocks = reader, writer, blocks
        self._layout, self._stream, self._capacity = layout, stream, capacity
        self._order = {layer: i for i, layer in enumerate(layers)}
        self._spare = layout.empty(spare) if spare else None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        spare = 0 if self._spare is None else self._spare.nbytes
        return sum(buffer.nbytes for buffer in self.buffers) + spare

    def stage(self, layer: int) -> None:
        """Start copying a layer; `kv` waits for it. Does nothing where no buffer was planned."""
        if layer in self.staged or not self.buffers:
            return
        rows = self.buffers[self._order[layer] % len(self.buffers)]
        count = self._writer.host_length
        # race: the layer that had this buffer before may still be read
        with self._stream.after_main():
            # race: rows may still be on their way to the host
            self._stream.wait_event(self._writer.event)
            self.streamed += self._reader.read(layer, 0, count, rows)
        self.staged[layer] = rows, self._stream.record_event()

    def kv(self, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V [1, Hkv, count, D] of a layer, held until the next call."""
        if layer in self.staged:
            return self._staged_kv(layer, count)
        return self.rows(layer, 0, count)

    def rows(self, layer: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V [1, Hkv, T, D] of positions first .. stop-1, held until the next call."""
        # race: rows may still be on their way to the host
        wait(self._writer.event, self._layout.device)
        count = stop - first
        short = count <= self._blocks.size
        rows = self._blocks.idle_buffer() if short else self._spare_rows(count)
        self.streamed += self._reader.read(layer, first, stop, rows)
        return self._layout.views(rows[:count])

    def _staged_kv(self, layer: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, arrived = self.staged.pop(layer)
        # race: attention would read rows that are still arriving
        wait(arrived, self._layout.device)
        # the newest are in the ring only
        first = min(self._writer.host_length, count)
        self._reader.read(layer, first, count, rows[first:])
        return self._layout.views(rows[:count])

    def _spare_rows(self, count: int) -> torch.Tensor:
        if self._spare is None or len(self._spare) < count:
            self._spare = None  # given back before the longer one is taken
            longer = max(count, 2 * self._blocks.size)
            self._spare = self._layout.empty(min(self._capacity, longer))
        return self._spare

    def gather(
        self,
        layer: int,
        index: torch.Tensor,
        counts: torch.Tensor,
        tail_start: torch.Tensor,
        stop: int,
    ) -> SparseRows:
        """Return a selection, index [1, 1, K] and counts [1], and the tail tail_start[0] .. stop-1
        as new rows. The host waits for all of it.
        """
        kept, tail = int(counts[0]), int(tail_start[0])
        rows = self._layout.empty(kept + stop - tail)
        # race: chosen rows, or the tail's older ones, may still be on their way to the host
        wait(self._writer.event, self._layout.device)
        if kept:
            self.streamed += self._reader.read_selected(layer, index[0, 0], kept, rows)
        self.streamed += self._reader.read(layer, tail, stop, rows[kept:])
        order = torch.arange(kept, dtype=torch.int32, device=rows.device)[None, None]
        return SparseRows(
            *self._layout.views(rows), order, counts, counts, torch.full_like(counts, len(rows))
        )

    def listed(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V [1, Hkv, n, D] of the positions `tokens`, int [n] ascending: copies."""
        return self._layout.views(self._picked(layer, tokens, 0, 0))

    def pick(
        self,
        layer: int,
        index: torch.Tensor,
        counts: torch.Tensor,
        tail_start: torch.Tensor,
        stop: int,
    ) -> SparseRows:
        """As `gather`, of one choice or one per head, index [1, h, K]: each row that any head chose
        comes once. Chosen positions may be newer than what is in host memory.
        """
        if layer in self._brought:
            return self._of_brought(layer, counts, tail_start)
        tokens, where = _each_once(index, counts)
        rows = self._picked(layer, tokens, int(tail_start[0]), stop)
        first, last = (torch.full_like(tail_start, n) for n in (len(tokens), len(rows)))
        return SparseRows(*self._layout.views(rows), where, counts, first, last)

    def pick_values(self, layer: int, index: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """V of a choice per head, index [1, Hkv, K], of which all count: [1, Hkv, K, D], copies. V
        of each row that any head chose comes once, and no K.
        """
        tokens, where = _each_once(index, counts)
        rows = self._layout.empty_values(len(tokens))
        # race: chosen rows may still be on their way to the host
        wait(self._writer.event, self._layout.device)
        self.streamed += self._reader.read_values(
            layer, tokens.int(), rows, self._layout.value_span
        )
        return of_heads(self._layout.values(rows)[None], where)

    def bring(
        self,
        group: Sequence[int],
        index: torch.Tensor,
        counts: torch.Tensor,
        tail_start: torch.Tensor,
        stop: int,
    ) -> None:
        """Start bringing what `pick` will be asked for, the same in each layer of an offload group,
        but for rows that are in rings: the newest are not written yet. The host waits to learn
        which, the device goes on.
        """
        (chosen, where), device = _each_once(index, counts), self._layout.device
        newest = torch.arange(int(tail_start[0]), stop, dtype=torch.int32, device=device)
        tokens = torch.cat([chosen.int(), newest])
        rows = self._layout.empty(len(tokens), len(group))
        # race: the memory of these rows may still be read as another tensor's
        with self._stream.after_main():
            # race: chosen rows may still be on their way to the host
            self._stream.wait_event(self._writer.event)
            old = self._reader.read_group(group, tokens, rows)
        self.streamed += old * len(group) * self._reader.part_bytes
        arrived = self._stream.record_event()
        brought = GroupRows(rows, old, tokens, where, len(chosen), arrived)
        self._brought |= {layer: (i, brought) for i, layer in enumerate(group)}

    def _of_brought(self, layer: int, counts: torch.Tensor, tail_start: torch.Tensor) -> SparseRows:
        """A layer's part of what was brought, once."""
        i, (rows, old, tokens, where, chosen, arrived) = self._brought.pop(layer)
        # race: attention would read rows that are still arriving
        wait(arrived, self._layout.device)
        own = rows[:, i]
        self._reader.read_ring(layer, tokens[old:], own[old:])
        first, last = (torch.full_like(tail_start, n) for n in (chosen, len(rows)))
        return SparseRows(*self._layout.views(own), where, counts, first, last)

    def drop_brought(self) -> None:
        """Drop what was brought for a step that broke off."""
        for _, brought in self._brought.values():
            # race: its memory would be another tensor's while rows still arrive
            wait(brought.arrived, self._layout.device)
        self._brought = {}

    def _picked(self, layer: int, tokens: torch.Tensor, first: int, stop: int) -> torch.Tensor:
        """Rows of positions `tokens`, then of first .. stop-1, in a buffer of their own."""
        rows = self._layout.empty(len(tokens) + stop - first)
        # race: chosen rows may still be on their way to the host
        wait(self._writer.event, self._layout.device)
        self.streamed += self._reader.read_tokens(layer, tokens.int(), rows)
        self.streamed += self._reader.read(layer, first, stop, rows[len(tokens) :])
        return rows

    def forget(self) -> None:
        """Drop what is staged: positions were dropped."""
        self.staged, self._brought = {}, {}

    def close(self) -> None:
        """Give the buffers back."""
        self.buffers, self._spare, self.staged, self._brought = [], None, {}, {}


def _each_once(index: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What any head of a choice reads, index [1, h, K]: positions [n], ascending, and where each
    entry is among them, int32 [1, h, most].
    """
    chosen = own_rows(index[0], counts[0])[None]
    tokens = chosen.unique()
    tokens = tokens[tokens >= 0]
    return tokens, torch.searchsorted(tokens, chosen.contiguous(), out_int32=True)
