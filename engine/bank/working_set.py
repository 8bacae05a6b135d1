"""The device's part of an offloaded group: slots that hold fetched rows, the tail's ring, and the
lanes on which rows travel.
"""

import torch

from engine.bank.streams import wait
from kernels.gather import move_rows
from kernels.slots import forget_slots, make_slots, plan_slots


class WorkingSet:
    """One group's buffer on the device: `slots` rows of fetched tokens, then the newest tokens
    twice over.

    rows [slots + 2 ring, layers, part]: token-major, packed by group, exactly as on the host.
    Position p lies in rows slots + p % ring and slots + ring + p % ring, so that any ring
    consecutive positions are consecutive rows somewhere.
    """

    def __init__(
        self, pack, placement, kv_heads, head_dim, part_bytes, capacity, dtype, device, backend
    ):
        self.pack, self.at = pack, {layer: i for i, layer in enumerate(pack)}
        self.first, self.ring, self.backend = placement.slots, placement.ring, backend
        self.reuse, self.by_layer = placement.reuse, placement.by_layer
        self.part, self.pitch = part_bytes, part_bytes * len(pack)
        self.width, self.shape = kv_heads * head_dim, (kv_heads, head_dim)
        count = self.first + 2 * self.ring
        self.rows = torch.empty(
            count, len(pack), part_bytes // dtype.itemsize, dtype=dtype, device=device
        )
        self.words = self.rows.view(count, -1).view(torch.int32)
        self.slots = (
            make_slots(capacity, self.first, placement.budget, device) if placement.budget else None
        )
        self.moved = torch.zeros(1, dtype=torch.int64, device=device)
        self._done = {}

    @property
    def nbytes(self):
        """Device bytes held."""
        return (
            self.rows.numel() * self.rows.element_size()
            + 8
            + (self.slots.nbytes if self.slots else 0)
        )

    def kv(self, layer):
        """K and V of a layer over slots and ring: two [1, Hkv, S, D] views."""
        rows = self.rows[:, self.at[layer]]
        return tuple(
            rows[:, i * self.width : (i + 1) * self.width]
            .unflatten(1, self.shape)
            .transpose(0, 1)[None]
            for i in (0, 1)
        )

    def write(self, layer, k, v, where):
        """Rows k, v [1, Q, Hkv, D] of new tokens into the ring; where int64 [2 Q]: their rows here,
        both copies.
        """
        both = torch.cat((k.flatten(2), v.flatten(2)), dim=2)[0]
        self.rows[:, self.at[layer], : 2 * self.width].index_copy_(
            0, where, torch.cat((both, both))
        )

    def load(self, index, count, table, offset, pool, lane):
        """Fetch what a selection adds: index int32 [K], count int32 [1], both on the device. Layers
        wait by `ready`.

        The lane runs behind the filter layer that chose (race: the plan would read indices that are
        not written yet) and so behind every layer of the step before (race: a fetch would overwrite
        slots that those still read).
        """
        with lane.after_main():
            if not self.reuse:
                forget_slots(self.slots, 0)
            plan_slots(index, count, self.slots, self.backend)
            s = self.slots
            move = dict(
                tokens=s.source,
                slots=s.target,
                count=s.misses,
                slabs=pool.slabs,
                moved=self.moved,
                programs=pool.programs,
                backend=self.backend,
            )
            if not self.by_layer:
                move_rows(table, offset, self.pitch, self.words, **move)
                self._done = dict.fromkeys(self.pack, lane.record_event())
                return
            width = self.part // 4
            for layer, i in self.at.items():
                move_rows(
                    table,
                    offset + i * self.part,
                    self.pitch,
                    self.words[:, i * width : (i + 1) * width],
                    **move,
                )
                self._done[layer] = lane.record_event()

    def ready(self, layer):
        """The current stream waits until a layer's rows have arrived (race: attention would read
        slots still being filled).
        """
        wait(self._done.get(layer))

    def forget(self, length):
        """Tokens from `length` on are no longer what the slots hold."""
        if self.slots is not None:
            forget_slots(self.slots, length)

    def counters(self):
        """int64 [5] on the device: hits, misses, evictions, plans, bytes moved."""
        none = torch.zeros(4, dtype=torch.int64, device=self.moved.device)
        return torch.cat((self.slots.counters if self.slots else none, self.moved))
