"""The device's part of an offload group: slots for fetched rows, and a ring of the newest tokens.

A step fetches only selected tokens that have no slot yet. Slots survive from step to step, and the
least recently selected tokens give theirs up (kernels/tier/lru_slots.py). Each group has its own
working set, so one group's fetch overlaps another group's attention.
"""

from __future__ import annotations

import torch

from engine.bank.base import SparseRows, Step, StepRows
from engine.bank.host.host_rows import HostRows
from engine.bank.host.streams import SideStream, wait
from engine.bank.row_layout import RowLayout
from engine.plan.placement import Placement
from kernels.rows.forms import as_bytes
from kernels.tier.lru_slots import forget_slots, make_slots, plan_slots


class WorkingSet:
    """One buffer of rows: `num_slots` fetched tokens, then a ring of the newest tokens held twice.

    rows [num_slots + 2 ring, layers, elements]: token-major, the group's layers side by side,
    exactly as on the host. Position p lies in ring rows num_slots + p % ring and num_slots + ring +
    p % ring. Any `ring` consecutive positions are therefore consecutive rows somewhere, and no
    kernel needs to know of a ring.
    """

    def __init__(
        self,
        group: tuple[int, ...],
        placement: Placement,
        layout: RowLayout,
        capacity: int,
        host: HostRows,
    ) -> None:
        self.group, self.ring, self.num_slots = group, placement.ring, placement.slots
        self._at = {layer: i for i, layer in enumerate(group)}
        self._reuse, self._by_layer = placement.reuse, placement.by_layer
        self._layout, self._host = layout, host
        count = self.num_slots + 2 * self.ring
        self._rows = layout.empty(count, len(group))
        # whole rows of the group, as copies see them: int32 [count, words]
        self.words = self._rows.view(count, -1).view(torch.int32)
        self._slots = (
            make_slots(capacity, self.num_slots, placement.budget, layout.device)
            if placement.budget
            else None
        )
        self._moved = torch.zeros(1, dtype=torch.int64, device=layout.device)
        self._fetched: dict[int, torch.cuda.Event | None] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        state = self._slots.nbytes if self._slots else 0
        return self._rows.nbytes + self._moved.nbytes + state

    def counters(self) -> torch.Tensor:
        """Return int64 [5] on the device: hits, misses, evictions, plans, bytes moved."""
        none = torch.zeros(4, dtype=torch.int64, device=self._moved.device)
        return torch.cat((self._slots.counters if self._slots else none, self._moved))

    # ---------------------------------------------------------------- the ring

    def step_rows(self, layer: int) -> StepRows:
        """Where a step's rows of a layer go: into both copies of the ring."""
        views = self._layout.views(self._rows[:, self._at[layer]])
        return StepRows(*views, (self.num_slots, self.ring))

    def refill(self, first: int, stop: int) -> int:
        """Copy positions first .. stop-1, at most `ring`, from the host into both copies of the
        ring; bytes that came over the link.
        """
        rows = max(0, stop - first)
        while first < stop:
            # up to the ring's end, then from its beginning
            count, at = min(stop - first, self.ring - first % self.ring), self.ring_row(first)
            self._host.read(self.group[0], first, self.words, at, count)
            again = at + self.ring
            self.words[again : again + count] = self.words[at : at + count]
            first += count
        return rows * len(self.group) * self._host.part_bytes

    def fill(self, layer: int, first: int, rows: torch.Tensor) -> None:
        """Write rows [n, elements] of a layer at positions from `first` on, at most `ring`, into
        both copies of the ring.
        """
        at = torch.arange(first, first + len(rows), device=rows.device) % self.ring + self.num_slots
        held = as_bytes(self._rows[:, self._at[layer]])
        held[at] = held[at + self.ring] = as_bytes(rows)

    def ring_row(self, position: int) -> int:
        """Return the row of a position in the ring's first copy."""
        return position % self.ring + self.num_slots

    def newest(self, layer: int, first: int, stop: int) -> torch.Tensor:
        """Return rows [T, elements] of positions first .. stop-1 of a layer: a view of the ring."""
        at = self.ring_row(first)
        return self._rows[at : at + stop - first, self._at[layer]]

    def views(self, layer: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V [1, Hkv, T, D] of `newest`."""
        return self._layout.views(self.newest(layer, first, stop))

    def listed(self, layer: int, tokens: torch.Tensor) -> torch.Tensor:
        """Return copies [n, elements] of the ring's rows of positions `tokens`, int [n]."""
        rows = as_bytes(self._rows[:, self._at[layer]])
        return rows[tokens.long() % self.ring + self.num_slots].view(self._rows.dtype)

    # ---------------------------------------------------------------- the slots

    def fetch(self, index: torch.Tensor, count: torch.Tensor, stream: SideStream) -> None:
        """Fetch the selected tokens that have no slot yet: index int32 [K], count int32 [1], on the
        device. `ready` waits for the rows.

        The stream runs behind the filter layer that chose (race: the plan would read indices that
        are not written yet) and so behind every layer of the step before (race: a fetch would
        overwrite slots that those still read).
        """
        s = self._slots
        assert s is not None, "this group was placed without slots"
        with stream.after_main():
            if not self._reuse:
                forget_slots(s, 0)
            plan_slots(index, count, s, self._host.backend)
            fresh = (s.target, s.misses, self._moved, self._host.pool.programs)
            if not self._by_layer:
                self._host.read(self.group[0], s.source, self.words, *fresh)
                self._fetched = dict.fromkeys(self.group, stream.record_event())
                return
            width = self._host.part_bytes // 4
            for layer, i in self._at.items():
                part = self.words[:, i * width : (i + 1) * width]
                self._host.read(layer, s.source, part, *fresh)
                self._fetched[layer] = stream.record_event()

    def ready(self, layer: int) -> None:
        """Make the current stream wait for a layer's fetched rows (race: attention would read slots
        still being filled). Once: what runs later on that stream is behind them, and no step may
        wait for the event of a graph that another step was captured in.
        """
        wait(self._fetched.pop(layer, None), self._layout.device)

    def selected(
        self, layer: int, counts: torch.Tensor, tail_start: torch.Tensor, step: Step
    ) -> SparseRows:
        """Return the rows that a layer attends to: the slots of the last `fetch`, and the tail from
        position tail_start [1] up to the step's newest in the ring.
        """
        assert self._slots is not None, "this group was placed without slots"
        self.ready(layer)
        first, stop = step.tail_in_ring(tail_start, self.num_slots, self.ring)
        return SparseRows(
            *self._layout.views(self._rows[:, self._at[layer]]),
            self._slots.slot_of[None, None],
            counts,
            first,
            stop,
        )

    def forget(self, length: int) -> None:
        """Empty the slots of tokens from `length` on."""
        if self._slots is not None:
            forget_slots(self._slots, length)
