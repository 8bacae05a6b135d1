"""The context bank with a host tier: sparse layers' rows live in host memory, the device keeps
slots, the tail and what streams by.

Same interface as DeviceBank. Positions 0 .. home-1 are in host memory; the newest (a tail and up to
127 more) also, or only, in a ring on the device. Prefill sends rows home chunk by chunk; decode
sends every complete block of 64; what a layer reads comes back as a fetched selection, as a stream
of blocks, or whole (engine/bank/host_reader.py). Host and device order is kept by events.
"""

import contextlib
import weakref

import torch

from engine.bank.block_table import BlockTable
from engine.bank.device import DeviceBank
from engine.bank.host_reader import HostReader
from engine.bank.streams import SideStream, wait
from engine.bank.working_set import WorkingSet
from engine.plan.layers import TAIL_BLOCK, tail_start
from engine.plan.placement import part_bytes
from kernels.gather import move_rows


class TieredBank(HostReader, DeviceBank):
    """Keys and values of one sequence; the layers of `placement` in `pool`'s host memory, the
    others as in DeviceBank.

    backend: kernel backend of the copies ("auto", "reference", "cpu", "triton"). Memory: the dense
    layers as in DeviceBank, for the others Placement.device_bytes; host blocks as tokens come.
    Raises OutOfHostMemory from write_chunk and before_step, nothing changed.
    """

    tiered = True

    def __init__(
        self, config, plan, capacity, dtype, device, placement, pool, backend="auto", donor=None
    ):
        super().__init__(
            config, plan, capacity, dtype, device, hosted=placement.layers, donor=donor
        )
        self._config, self.pool = config, pool
        # unpinned rows go through the CPU
        self._backend = backend if pool.pinned or self.device.type == "cpu" else "reference"
        self._fetch, self._home_lane = SideStream(self.device), SideStream(self.device)
        self.streamed = self.stalls = 0
        self._lengths()
        self._build(placement)
        self._end = weakref.finalize(self, _give_back, self.table, (self._fetch, self._home_lane))

    # ---------------------------------------------------------------- what it is made of

    def _build(self, placement):
        self.placement = placement
        self._part = part_bytes(self._config, self.dtype.itemsize)
        sizes = (
            self._config.num_kv_heads,
            self._config.head_dim,
            self._part,
            self.capacity,
            self.dtype,
            self.device,
            self._backend,
        )
        self._sets = [WorkingSet(pack, placement, *sizes) for pack in placement.packs]
        self._of, self._offset, at = {}, {}, 0
        for ws in self._sets:
            self._of.update(dict.fromkeys(ws.pack, ws))
            self._offset.update({layer: at + i * self._part for layer, i in ws.at.items()})
            at += TAIL_BLOCK * ws.pitch
        self.table = BlockTable(self.pool, at, self.capacity, self.device)
        self._stage = [self._rows(placement.chunk) for _ in range(2)]
        self._stage_free, self._staged, self._turn = [None, None], [None, None], 0
        self._block = [self._rows(placement.block) for _ in range(2)]
        self._block_free, self._block_turn, self._ahead = [None, None], 0, None
        self._whole = [self._rows(self.capacity) for _ in range(placement.stages)]
        self._whole_of, self._spare = {}, None
        self._order = list(placement.layers)

    def _rows(self, count):
        return torch.empty(
            count, self._part // self.dtype.itemsize, dtype=self.dtype, device=self.device
        )

    def _lengths(self):
        self.home = 0  # positions below are in host memory
        self._ring_stop = 0
        self._home_event, self._layer_event = None, {}

    @property
    def length(self):
        """Tokens whose rows are somewhere, the one being written included."""
        return max(self.home, self._ring_stop)

    @property
    def nbytes(self):
        """Bytes reserved on the device."""
        own = [
            *self._stage,
            *self._block,
            *self._whole,
            self.table.addresses,
            *([] if self._spare is None else [self._spare]),
        ]
        return (
            super().nbytes
            + sum(t.numel() * t.element_size() for t in own)
            + sum(ws.nbytes for ws in self._sets)
        )

    @property
    def host_nbytes(self):
        """Bytes of host blocks held, shared ones too."""
        return len(self.table.blocks) * self.table.block_bytes

    def hosts(self, layer):
        """Whether a layer's rows live in host memory."""
        return layer in self._of

    def streams(self, layer, backend):
        """Whether dense attention to a layer must go block by block: it is offloaded, longer than a
        stream block and not staged whole.

        Never on the reference launchers: there rows are brought together, so that placement cannot
        change a bit.
        """
        return (
            layer in self._of
            and layer not in self._whole_of
            and backend != "reference"
            and self.length > self.placement.block
        )

    def capturable(self, runtime):
        """Whether a step of this runtime can be captured: it fetches by selection (lengths stay on
        the device), from pinned memory.
        """
        return runtime.packed and self.pool.pinned

    def counters(self):
        """{pack's first layer: (hits, misses, evictions, plans, bytes)} read from the device in one
        copy.
        """
        if not self._sets:
            return {}
        rows = torch.stack([ws.counters() for ws in self._sets]).tolist()
        return {ws.pack[0]: tuple(row) for ws, row in zip(self._sets, rows)}

    # ---------------------------------------------------------------- writing

    def write(self, layer, k, v, q_pre_rope, ring, positions):
        """Rows of a decode step: dense layers as in DeviceBank, the others into their working set's
        ring.
        """
        ws = self._of.get(layer)
        if ws is None:
            super().write(layer, k, v, q_pre_rope, ring, positions)
            return
        ring.write(layer, q_pre_rope, positions)
        at = positions[0] % ws.ring + ws.first
        ws.write(layer, k, v, torch.cat((at, at + ws.ring)))

    def write_chunk(self, layer, k, v, start):
        """Rows k, v [1, C, Hkv, D] of a prefill chunk: staged, and sent home on their own lane
        under the compute that follows.
        """
        if layer not in self._of:
            super().write_chunk(layer, k, v, start)
            return
        size = self.placement.chunk
        self._begin(start, start + k.shape[1])
        for first in range(0, k.shape[1], size):
            part = slice(first, first + size)
            self._send(layer, k[:, part], v[:, part], start + first)

    def _begin(self, start, stop):
        """Make room for positions start .. stop-1 at home; the rows decoded since the last prefill
        go home first.
        """
        if self.home < start:
            self.settle(start)
        self._reserve_home(start, stop)
        self.home = max(self.home, stop)
        # a chunk does not pass through the ring: it is read back when decode begins
        self._ring_stop = 0

    def _reserve_home(self, start, stop):
        if self.table.shares(start, stop):
            # race: a copy of a shared block would miss rows that are still going home
            self._home_lane.synchronize()
        self.table.reserve(start, stop)

    def _send(self, layer, k, v, start):
        turn, count = self._turn, k.shape[1]
        self._turn = 1 - turn
        free = self._stage_free[turn]
        if free is not None and not free.query():
            self.stalls += 1
        # race: the rows staged two layers ago may still be on their way home
        wait(free)
        stage, width = self._stage[turn], self.kv_heads * self.head_dim
        stage[:count, :width] = k[0].flatten(1)
        stage[:count, width : 2 * width] = v[0].flatten(1)
        # race: the copy would read the stage before it is written
        with self._home_lane.after_main():
            self._move(layer, start, stage, 0, count, to_host=True)
        self._layer_event[layer] = (
            self._layer_event.get(layer, (None, None))[1],
            self._home_lane.record_event(),
        )
        self._stage_free[turn] = self._home_event = self._layer_event[layer][1]
        self._staged[turn] = (layer, start, start + count)

    def settle(self, stop):
        """Send rows home .. stop-1 home from the ring."""
        if stop <= self.home:
            return
        self._reserve_home(self.home, stop)
        # race: the ring's newest rows may not be written yet
        with self._home_lane.after_main():
            for ws in self._sets:
                move_rows(
                    self.table.addresses,
                    self._offset[ws.pack[0]],
                    ws.pitch,
                    ws.words,
                    self.home,
                    ws.first + self.home % ws.ring,
                    stop - self.home,
                    self.pool.slabs,
                    to_host=True,
                    backend=self._backend,
                )
        self._home_event = self._home_lane.record_event()
        self._layer_event = dict.fromkeys(self._order, (self._home_event, self._home_event))
        self.home = stop

    # ---------------------------------------------------------------- around a step

    def before_step(self, n):
        """The next step makes the bank n tokens long: room at home, the tail in the ring, what went
        home has arrived in time.
        """
        self._reserve_home(self.home, n)
        if n % TAIL_BLOCK == 0:
            # Race: this step's selection may hold the block that went home 64 steps ago, and it
            # begins to overwrite the ring where an older one was copied from. Only now: a wait in
            # the step behind the copy would be seen.
            wait(self._home_event)
        if self._ring_stop == 0 and n > 1:
            self._refill(n - 1)
        self._ring_stop = n

    def after_step(self, n):
        """A step has been issued; a block that is now complete goes home."""
        if n % TAIL_BLOCK == 0:
            self.settle(n)

    @contextlib.contextmanager
    def rehearsal(self, n):
        """As DeviceBank's: the ring is filled for n tokens, and again for the true length when the
        next step begins.
        """
        home = self.length
        self.settle(home)
        self._refill(n - 1)
        # the steps' own row is read from the ring, where they write it
        self.home, self._ring_stop = n - 1, n
        try:
            yield
        finally:
            self.home, self._ring_stop = home, 0

    def _refill(self, length):
        """Bring the tail of `length` tokens back into the ring."""
        ring = self.placement.ring
        low = tail_start(length, ring - 2 * TAIL_BLOCK)
        # race: the rows may still be on their way home
        wait(self._home_event)
        for ws in self._sets:
            at, stop = low, min(length, self.home)
            # up to the ring's end, then from its beginning; both copies
            while at < stop:
                count = min(stop - at, ring - at % ring)
                for copy in (0, ring):
                    move_rows(
                        self.table.addresses,
                        self._offset[ws.pack[0]],
                        ws.pitch,
                        ws.words,
                        at,
                        ws.first + copy + at % ring,
                        count,
                        self.pool.slabs,
                        backend=self._backend,
                    )
                at += count

    def rewind(self, n, broken=False):
        """Forget positions n and beyond: truncate, or a chunk or step that was broken off."""
        if not broken and n >= self.length and not self._ahead:
            return
        # race: a plan that is still to run would promise its rows after the maps were emptied
        self._drain()
        # between a plan and its copy the maps promise rows that never came: start with empty slots
        if broken:
            for ws in self._sets:
                ws.forget(0)
        self.table.cut(n)
        if n < self.home:
            for ws in self._sets:
                ws.forget(n)
            self.home, self._ring_stop = n, 0
        elif self._ring_stop:
            self._ring_stop = min(self._ring_stop, n)
        self._staged, self._ahead, self._whole_of = [None, None], None, {}

    def _drain(self):
        self._fetch.synchronize()
        self._home_lane.synchronize()

    # ---------------------------------------------------------------- copies, other plans, end

    def copy_from(self, other, length):
        """The first `length` rows of another bank of the same model (fork): host blocks are shared,
        the rest is copied.
        """
        shared = (
            other.tiered
            and other.placement.packs == self.placement.packs
            and other.pool is self.pool
        )
        for layer in range(self.num_layers):
            if layer not in self._of and not other.hosts(layer):
                self._copy_layer(layer, other, length)
            elif not shared:
                for first, k, v in other.blocks(layer, 0, length, self.placement.chunk):
                    self.write_chunk(layer, k.transpose(1, 2), v.transpose(1, 2), first)
        if shared:
            other.settle(length)
            # race: this bank's lanes know nothing of the other's
            other._drain()
            self.table.share(other.table, length)
            self.home, self._ring_stop = length, 0

    def relayout(self, plan, placement=None):
        """The bank that serves another layer plan: this one where rows may stay where they are,
        else a new one that was given them.

        Raises OutOfHostMemory with this bank as it was: both packings of the offloaded rows exist
        for a moment.
        """
        if placement is None or placement == self.placement:
            return super().relayout(plan)
        self.settle(self.length)
        self._drain()
        new = TieredBank(
            self._config,
            plan,
            self.capacity,
            self.dtype,
            self.device,
            placement,
            self.pool,
            self._backend,
            donor=self,
        )
        try:
            new.copy_from(self, self.home)
        except BaseException:
            new.close()
            raise
        self.close()
        return new

    def close(self):
        """Give all memory back, once whatever is in flight has landed."""
        self._end()
        super().close()
        self._sets, self._of = [], {}
        self._stage = self._block = self._whole = []
        self._spare, self._whole_of = None, {}


def _give_back(table, lanes):
    for lane in lanes:
        # race: freed memory would still be read or written by a transfer
        lane.synchronize()
    table.cut(0)


def bank_figures(bank):
    """A bank's part of SessionStats, as keyword arguments; one copy from the device where there is
    a host tier.
    """
    size = torch.empty((), dtype=bank.dtype).element_size()
    every = bank.num_layers * bank.capacity * 2 * bank.kv_heads * bank.head_dim * size * bank.batch
    figures = dict(bank_bytes=bank.nbytes, resident=bank.nbytes / every)
    if not bank.tiered:
        return figures
    names = ("hits", "misses", "evictions", "plans", "bytes")
    groups = {layer: dict(zip(names, row)) for layer, row in bank.counters().items()}
    total = {name: sum(row[name] for row in groups.values()) for name in names}
    return figures | dict(
        host_bytes=bank.host_nbytes,
        pin_seconds=bank.pool.pin_seconds,
        hits=total["hits"],
        misses=total["misses"],
        evictions=total["evictions"],
        hit_rate=total["hits"] / max(1, total["hits"] + total["misses"]),
        bytes_fetched=total["bytes"],
        bytes_streamed=bank.streamed,
        staging_stalls=bank.stalls,
        groups=groups,
    )
