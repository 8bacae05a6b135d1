"""Write-back: how new rows reach host memory, and which event says that they have.

A prefill chunk goes through one of two staging buffers and is copied on the write stream under the
compute that follows. Decode steps write into the working sets' rings; every complete block of 64
tokens is copied from there. Readers on other streams wait for the events recorded here.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.bank.host.host_rows import HostRows
from engine.bank.host.streams import SideStream, wait
from engine.bank.host.working_set import WorkingSet
from engine.bank.row_layout import RowLayout


class WriteBack:
    """Copies to the host on `stream`. chunk: rows of one staging buffer."""

    def __init__(
        self,
        host: HostRows,
        sets: Sequence[WorkingSet],
        layout: RowLayout,
        chunk: int,
        stream: SideStream,
    ) -> None:
        self.host_length = 0  # positions below are in host memory, or a copy of them was issued
        self.stalls = 0  # chunks that found their staging buffer still being copied
        self.event: torch.cuda.Event | None = None  # behind every copy issued so far
        self._host, self._sets, self._layout, self._stream = host, sets, layout, stream
        # per layer: the events behind all copies but the newest, and behind the newest
        self._layer_events: dict[int, tuple] = {}
        self._chunk = chunk
        self._staging = [layout.empty(chunk) for _ in range(2)]
        self._staging_free: list[torch.cuda.Event | None] = [None, None]
        # per staging buffer, its rows: (layer, first position, one past the last)
        self._staged: list[tuple[int, int, int] | None] = [None, None]
        self._turn = 0  # the staging buffer that is filled next

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(buffer.nbytes for buffer in self._staging)

    # ---------------------------------------------------------------- writing

    def reserve(self, start: int, stop: int) -> None:
        """Make room for positions start .. stop-1 in host memory. Raises OutOfHostMemory, nothing
        changed.
        """
        if self._host.table.shares(start, stop):
            # race: a copy of a shared block would miss rows that are still being written back
            self._stream.synchronize()
        self._host.table.reserve(start, stop)

    def begin_chunk(self, start: int, stop: int) -> None:
        """Make room for a chunk at start .. stop-1, after writing back the tokens decoded since the
        last prefill.
        """
        if self.host_length < start:
            self.write_ring(start)
        self.reserve(start, stop)
        self.host_length = max(self.host_length, stop)

    def write_chunk(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int, backend: str = "auto"
    ) -> None:
        """Write k, v [C, Hkv, D] of a chunk back from position `start` on, one staging buffer after
        the other. backend: as in Bank.write_chunk.
        """
        for first in range(0, len(k), self._chunk):
            piece = slice(first, first + self._chunk)
            self._write_piece(layer, k[piece], v[piece], start + first, backend)

    def _write_piece(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int, backend: str
    ) -> None:
        turn, count = self._turn, len(k)
        self._turn = 1 - turn
        free = self._staging_free[turn]
        if free is not None and not free.query():
            self.stalls += 1
        # race: the rows staged two layers ago may still be on their way to the host
        wait(free, self._layout.device)
        buffer = self._staging[turn]
        self._layout.fill(buffer[:count], k, v, backend)
        # race: the copy would read the buffer before it is written
        with self._stream.after_main():
            self._host.write(layer, start, buffer, 0, count)
        event = self._stream.record_event()
        self._layer_events[layer] = self._layer_events.get(layer, (None, None))[1], event
        self._staging_free[turn] = self.event = event
        self._staged[turn] = (layer, start, start + count)

    def write_ring(self, stop: int) -> None:
        """Write positions host_length .. stop-1 back from the rings."""
        if stop <= self.host_length:
            return
        self.reserve(self.host_length, stop)
        # race: the ring's newest rows may not be written yet
        with self._stream.after_main():
            for ws in self._sets:
                at, count = ws.ring_row(self.host_length), stop - self.host_length
                self._host.write(ws.group[0], self.host_length, ws.words, at, count)
        self.event = self._stream.record_event()
        for ws in self._sets:
            self._layer_events.update(dict.fromkeys(ws.group, (self.event, self.event)))
        self.host_length = stop

    # ---------------------------------------------------------------- for readers

    def staged_rows(self, layer: int, stop: int) -> tuple[int, torch.Tensor] | None:
        """Return (first position, rows) of a layer's newest chunk while it is still staged and
        reaches `stop`, else None.
        """
        staged = self._staged[1 - self._turn]
        if staged is None or staged[0] != layer or not staged[1] < stop <= staged[2]:
            return None
        return staged[1], self._staging[1 - self._turn]

    def past_event(self, layer: int) -> torch.cuda.Event | None:
        """Return the event after which a layer's rows are in host memory. The chunk that was staged
        last is excluded: it is read from its staging buffer.
        """
        staged = self._staged[1 - self._turn]
        before, newest = self._layer_events.get(layer, (None, None))
        return before if staged is not None and staged[0] == layer else newest

    # ---------------------------------------------------------------- going back, end

    def forget_staged(self) -> None:
        """Make the staging buffers unreadable: positions were dropped."""
        self._staged = [None, None]

    def close(self) -> None:
        """Give the staging buffers back."""
        self._staging = []
