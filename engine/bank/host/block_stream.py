"""Streams an offloaded layer to the device block by block, through two buffers.

While attention works on one block the next one is being copied; at a layer's end, the first block
of the next layer. The newest chunk is read from its staging buffer, before its copy to the host is
done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from engine.bank.base import PromptRows
from engine.bank.host.row_reader import RowReader
from engine.bank.host.streams import SideStream, copy_rows, record_main, wait
from engine.bank.host.write_back import WriteBack
from engine.bank.row_layout import RowLayout


class _Copy(NamedTuple):
    """A block that is being filled: positions first .. stop-1 of a layer, behind the rows that
    `named` lists.
    """

    layer: int
    first: int
    stop: int
    named: PromptRows | None
    buffer: int  # which of the two
    arrived: torch.cuda.Event | None


class BlockStream:
    """The two stream blocks of `size` rows each, filled on `stream`. layers: the offloaded layers
    in the order in which a pass reads them.
    """

    def __init__(
        self,
        reader: RowReader,
        writer: WriteBack,
        layout: RowLayout,
        layers: Sequence[int],
        size: int,
        stream: SideStream,
    ) -> None:
        self.streamed = 0  # bytes read from host memory, but for listed rows
        # bytes of listed rows: int64 [1] on the device, which alone knows how many there were
        self.moved = torch.zeros(1, dtype=torch.int64, device=layout.device)
        self.size = size
        self._reader, self._writer, self._layout = reader, writer, layout
        self._stream = stream
        self._next_layer = dict(zip(layers, layers[1:]))
        self._buffers = [layout.empty(size) for _ in range(2)]
        # per buffer: behind the attention to the block that it held last
        self._free: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0  # the buffer that is filled next
        self._ahead: _Copy | None = None  # started before anybody asked for it

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(buffer.nbytes for buffer in self._buffers) + self.moved.nbytes

    @property
    def prefetching(self) -> bool:
        """Whether a block was started that nobody has asked for yet."""
        return self._ahead is not None

    def idle_buffer(self) -> torch.Tensor:
        """Return the buffer that no copy is filling, for rows that hold until the next block."""
        return self._buffers[self._turn]

    def blocks(
        self, layer: int, start: int, stop: int, size: int | None = None, ahead: bool = True
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Stream positions start .. stop-1 of a layer: yields (first, K, V) as Bank.blocks says,
        the next block in flight while one is worked on.
        """
        size = min(size or self.size, self.size)
        spans = [(first, min(stop, first + size)) for first in range(start, stop, size)]
        coming = [self._start(layer, *spans[0])] if spans else []
        for i, (first, last) in enumerate(spans):
            if i + 1 < len(spans):
                coming.append(self._start(layer, *spans[i + 1]))
            block = coming.pop(0)
            # race: attention would read rows that are still arriving
            wait(block.arrived, self._layout.device)
            yield first, *self._layout.views(self._buffers[block.buffer][: last - first])
            self._free[block.buffer] = record_main(self._layout.device)
        following = self._next_layer.get(layer)
        if ahead and spans and following is not None:
            self._ahead = self._start(following, *spans[0])

    def gathered(
        self, layer: int, wanted: Sequence[PromptRows], following: int | None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Bring listed rows and the newest ones over: yields K, V as Bank.gathered says, the next
        of `wanted` in flight while one is worked on, or the first for the layer `following`.
        """
        coming = [self._start_listed(layer, wanted[0])]
        for i, rows in enumerate(wanted):
            if i + 1 < len(wanted):
                coming.append(self._start_listed(layer, wanted[i + 1]))
            elif following is not None:
                self._ahead = self._start_listed(following, wanted[0])
            block = coming.pop(0)
            # race: attention would read rows that are still arriving
            wait(block.arrived, self._layout.device)
            listed, past = len(rows.tokens), rows.begin - rows.first
            buffer = self._buffers[block.buffer][: listed + rows.stop - rows.first]
            copy_rows(buffer[listed + past :], self.newest(layer, rows.begin, rows.stop))
            yield self._layout.views(buffer)
            self._free[block.buffer] = record_main(self._layout.device)

    def _start(self, layer: int, first: int, stop: int) -> _Copy:
        """Begin to fill the next buffer, unless exactly this was begun ahead."""
        ahead = self._begun(layer, first, stop, None)
        if ahead is not None:
            return ahead
        staged = self._writer.staged_rows(layer, stop)
        with self._filling(layer) as (turn, buffer):
            middle = stop if staged is None else max(first, min(stop, staged[0]))
            self.streamed += self._reader.read(layer, first, middle, buffer)
            if staged is not None:
                low, rows = staged
                copy_rows(buffer[middle - first : stop - first], rows[middle - low : stop - low])
            return _Copy(layer, first, stop, None, turn, self._stream.record_event())

    def _start_listed(self, layer: int, rows: PromptRows) -> _Copy:
        """As `_start`, for listed rows and those from rows.first up to the chunk."""
        first, stop = rows.first, rows.begin
        ahead = self._begun(layer, first, stop, rows)
        if ahead is not None:
            return ahead
        with self._filling(layer) as (turn, buffer):
            listed = len(rows.tokens)
            self._reader.read_listed(layer, rows.tokens, rows.count, buffer[:listed], self.moved)
            self.streamed += self._reader.read(layer, first, stop, buffer[listed:])
            return _Copy(layer, first, stop, rows, turn, self._stream.record_event())

    def _begun(self, layer: int, first: int, stop: int, named: PromptRows | None) -> _Copy | None:
        """Return the copy that was begun ahead, if it is this one."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        if ahead[:3] == (layer, first, stop) and ahead.named is named:
            return ahead
        # race: its list, given back now, would be written again while it is read
        wait(ahead.arrived, self._layout.device)
        return None

    @contextlib.contextmanager
    def _filling(self, layer: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Take the next buffer, and issue the work inside to the stream once a layer's rows may be
        read and the buffer written.
        """
        turn = self._turn
        self._turn = 1 - turn
        # race: staged rows and the ring may not be written yet
        with self._stream.after_main():
            # race: attention may still read the block that this buffer held before
            self._stream.wait_event(self._free[turn])
            # race: rows may still be on their way to the host
            self._stream.wait_event(self._writer.past_event(layer))
            yield turn, self._buffers[turn]

    def newest_rows(self, layer: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of the newest chunk or step: views of the staging buffer while it holds
        them, else a copy.
        """
        return self._layout.views(self.newest(layer, first, stop))

    def newest(self, layer: int, first: int, stop: int) -> torch.Tensor:
        """Return rows [T, elements], as `newest_rows`."""
        staged = self._writer.staged_rows(layer, stop)
        if staged is not None and first >= staged[0]:
            low, rows = staged
            return rows[first - low : stop - low]
        # race: rows may still be on their way to the host
        wait(self._writer.event, self._layout.device)
        rows = self._layout.empty(stop - first)
        self.streamed += self._reader.read(layer, first, stop, rows)
        return rows

    def forget(self) -> None:
        """Drop the block that was started ahead: positions were dropped."""
        self._ahead = None

    def close(self) -> None:
        """Give the buffers back."""
        self._buffers = []
