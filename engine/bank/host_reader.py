"""How rows of an offloaded layer come back: a fetched selection, a stream of blocks, or the whole
layer.

The reading half of TieredBank (engine/bank/tiered.py), which owns every buffer named here. Comments
at waits name the race they prevent.
"""

import torch

from engine.bank.streams import copy_rows, record_main, wait
from kernels.gather import move_rows


class HostReader:
    """Mixed into TieredBank in front of DeviceBank: layers that are on the device are read there."""

    def fetch(self, group_layers, index, counts):
        """A filter layer has chosen index [1, 1, K], counts [1] for these sparse layers: fetch what
        their slots do not hold.
        """
        ws = self._of.get(group_layers[0])
        if ws is not None:
            ws.load(
                index[0, 0],
                counts,
                self.table.addresses,
                self._offset[ws.pack[0]],
                self.pool,
                self._fetch,
            )

    def arrived(self, layers):
        """The current stream waits until what was fetched for these layers is there."""
        ws = self._of.get(layers[0])
        if ws is not None:
            for layer in ws.pack:
                ws.ready(layer)

    def selected(self, layer, index, counts, start, step, packed=True):
        """(k, v, index, counts, tail start, lengths) as `decode_sparse` takes them, for a selection
        and the tail from `start` [1].

        packed: the selection was fetched by `fetch`; else its rows are gathered on the host, copied
        and waited for.
        """
        ws = self._of.get(layer)
        if ws is None:
            return super().selected(layer, index, counts, start, step, packed)
        if not packed:
            return self._gathered(layer, index, counts, start)
        ws.ready(layer)
        first = start % ws.ring + ws.first
        return (
            *ws.kv(layer),
            ws.slots.slot_of[None, None],
            counts,
            first,
            first + (step.visible - start),
        )

    def _gathered(self, layer, index, counts, start):
        kept, tail = int(counts[0]), int(start[0])
        stop = self.length
        rows = self._rows(kept + stop - tail)
        if kept:
            # race: chosen rows may still be on their way home
            wait(self._home_event)
            ws = self._of[layer]
            move_rows(
                self.table.addresses,
                self._offset[layer],
                ws.pitch,
                rows.view(torch.int32),
                index[0, 0],
                0,
                kept,
                self.pool.slabs,
                backend="reference",
            )
        self._read(layer, tail, stop, rows[kept:])
        self.streamed += rows.numel() * rows.element_size()
        order = torch.arange(kept, dtype=torch.int32, device=self.device)[None, None]
        return (
            *self._views(rows),
            order,
            counts,
            counts,
            torch.full_like(counts, kept + stop - tail),
        )

    def _views(self, rows):
        width, shape = self.kv_heads * self.head_dim, (self.kv_heads, self.head_dim)
        return tuple(
            rows[:, i * width : (i + 1) * width].unflatten(1, shape).transpose(0, 1)[None]
            for i in (0, 1)
        )

    def _read(self, layer, first, stop, out):
        """Copy rows first .. stop-1 of a layer to out on the current stream, from the host, and
        past `home` from the ring.
        """
        ws, middle = self._of[layer], min(max(first, self.home), stop)
        if first < middle:
            self._move(layer, first, out, 0, middle - first)
        if middle < stop:
            at = ws.first + middle % ws.ring
            copy_rows(
                out[middle - first : stop - first], ws.rows[at : at + stop - middle, ws.at[layer]]
            )

    def kv(self, layer, stop=None):
        """K and V of a layer as [1, Hkv, T, D] views. An offloaded layer is brought over whole (T
        at most its length): the way of methods that know nothing of tiers; it holds until the next
        such call.
        """
        if layer not in self._of:
            return super().kv(layer, stop)
        count = self.length if stop is None else min(stop, self.length)
        if layer in self._whole_of:
            rows, event = self._whole_of.pop(layer)
            # race: attention would read rows that are still arriving
            wait(event)
            # the newest are in the ring only
            self._read(layer, min(self.home, count), count, rows[min(self.home, count) :])
            return self._views(rows[:count])
        wait(self._home_event)  # race: rows may still be on their way home
        rows = (
            self._block[self._block_turn]
            if count <= self.placement.block
            else self._spacious(count)
        )
        self._read(layer, 0, count, rows)
        self.streamed += count * self._part
        return self._views(rows[:count])

    def _spacious(self, count):
        if self._spare is None or len(self._spare) < count:
            self._spare = None
            self._spare = self._rows(min(self.capacity, max(count, 2 * self.placement.block)))
        return self._spare

    def stage(self, layer):
        """Start bringing a whole offloaded layer over, on the fetch lane (brutal offload); `kv`
        waits for it.
        """
        if layer not in self._of or layer in self._whole_of or not self._whole:
            return
        rows = self._whole[self._order.index(layer) % len(self._whole)]
        # race: the layer that had this stage before may still be read
        with self._fetch.after_main():
            self._fetch.wait_event(self._home_event)  # race: rows may still be on their way home
            count = min(self.home, self.length)
            self._move(layer, 0, rows, 0, count)
        self.streamed += count * self._part
        self._whole_of[layer] = rows, self._fetch.record_event()

    def blocks(self, layer, start, stop, size=None):
        """Stream rows start .. stop-1 of a layer: yields (first, K, V), the next block in flight
        while one is worked on.
        """
        if layer not in self._of:
            yield from super().blocks(layer, start, stop, size or self.placement.block)
            return
        size = min(size or self.placement.block, self.placement.block)
        spans = [(first, min(stop, first + size)) for first in range(start, stop, size)]
        coming = [self._start(layer, *spans[0])] if spans else []
        for i, (first, last) in enumerate(spans):
            if i + 1 < len(spans):
                coming.append(self._start(layer, *spans[i + 1]))
            turn, event = coming.pop(0)
            # race: attention would read rows that are still arriving
            wait(event)
            yield first, *self._views(self._block[turn][: last - first])
            self._block_free[turn] = record_main(self.device)
        after = self._order.index(layer) + 1
        if spans and after < len(self._order) and spans[0][1] <= self.home:
            self._ahead = (
                self._order[after],
                *spans[0],
                self._start(self._order[after], *spans[0]),
            )

    def _start(self, layer, first, last):
        """Begin to fill the next stream block; returns (its number, the event to wait for)."""
        if self._ahead is not None:
            ahead, self._ahead = self._ahead, None
            if ahead[:3] == (layer, first, last):
                return ahead[3]
        turn = self._block_turn
        self._block_turn = 1 - turn
        staged = self._staged_rows(layer, last)
        # race: staged rows and the ring may not be written yet
        with self._fetch.after_main():
            # race: attention may still read what this block held before
            self._fetch.wait_event(self._block_free[turn])
            self._fetch.wait_event(
                self._past_event(layer)
            )  # race: rows may still be on their way home
            middle = last if staged is None else max(first, min(last, staged[0]))
            self._read(layer, first, middle, self._block[turn])
            if staged is not None:
                copy_rows(
                    self._block[turn][middle - first : last - first],
                    staged[1][middle - staged[0] : last - staged[0]],
                )
            self.streamed += (middle - first) * self._part
            return turn, self._fetch.record_event()

    def _past_event(self, layer):
        """Behind what went home of a layer; the chunk that is still staged apart, which is read
        from its stage.
        """
        held = self._staged[1 - self._turn]
        return self._layer_event.get(layer, (None, None))[held is None or held[0] != layer]

    def _staged_rows(self, layer, last):
        """(first position, rows) of the newest chunk of a layer while it is still staged and
        reaches `last`, or None.
        """
        held = self._staged[1 - self._turn]
        if held is None or held[0] != layer or not held[1] < last <= held[2]:
            return None
        return held[1], self._stage[1 - self._turn]

    def own(self, layer, first, last):
        """K and V of rows first .. last-1, the newest chunk or step, as views: from the stage where
        they still are.
        """
        staged = self._staged_rows(layer, last)
        if staged is not None and first >= staged[0]:
            return self._views(staged[1][first - staged[0] : last - staged[0]])
        wait(self._home_event)  # race: rows may still be on their way home
        rows = self._rows(last - first)
        self._read(layer, first, last, rows)
        return self._views(rows)

    def _move(self, layer, token, buffer, slot, count, to_host=False):
        """Rows token .. token+count-1 of a layer between the host and buffer[slot:], on the current
        stream.
        """
        ws = self._of[layer]
        move_rows(
            self.table.addresses,
            self._offset[layer],
            ws.pitch,
            buffer.view(torch.int32),
            token,
            slot,
            count,
            self.pool.slabs,
            to_host=to_host,
            backend=self._backend,
        )
