"""The context bank with a host tier: offloaded layers live in host memory.

Dense layers stay in a DeviceBank. An offloaded layer's positions below host_length are in host
memory; its newest tokens are also, or only, in a ring on the device. Prefill writes chunks back as
they come, decode writes back every complete block of 64. A layer's rows come to the device as a
fetched selection, block by block, or whole. Events order host and device; every wait names the race
that it prevents.

    host_rows.py     the rows in host memory, by layer and position (block_table.py, host_pool.py)
    write_back.py    how rows get there: staging buffers, the write stream, host_length, events
    working_set.py   a group's slots for fetched rows, and the ring of its newest tokens
    block_stream.py  a layer read block by block through two buffers
    whole_layers.py  a layer read whole
    cache/           a layer's first tokens and the blocks that were read last
    row_reader.py    shared by the last three: a layer's rows from the host, then from the ring
    row_layout.py    how K and V lie in a row
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from engine.bank.base import Bank, PromptRows, SparseRows, Step, StepRows
from engine.bank.device import DeviceBank
from engine.bank.host.block_stream import BlockStream
from engine.bank.host.cache.cached_blocks import CachedBlocks, counted
from engine.bank.host.host_rows import HostRows
from engine.bank.host.row_reader import RowReader
from engine.bank.host.streams import SideStream, wait
from engine.bank.host.whole_layers import WholeLayers
from engine.bank.host.working_set import WorkingSet
from engine.bank.host.write_back import WriteBack
from engine.bank.pool.block_table import BlockTable
from engine.bank.pool.host_pool import HostPool
from engine.bank.row_layout import RowLayout
from engine.bank.window_ring import WindowRing
from engine.base.device import synchronize
from engine.base.interrupts import complete
from engine.model.config.config import ModelConfig
from engine.plan.layers import TAIL_BLOCK, LayerPlan, tail_start
from engine.plan.needs import BlockCache
from engine.plan.placement import Placement, part_bytes


class TieredBank(Bank):
    """K and V of one sequence: the layers of `placement` in the host memory of `pool`, the others
    on the device.

    backend: kernel backend of the copies ("auto", "reference", "cpu", "triton"). donor: a bank of
    the same model that hands its device layers over. rows_alone: as DeviceBank's. Device memory:
    Placement.device_items; host blocks are taken as tokens come. write_chunk and before_step raise
    OutOfHostMemory, nothing changed.
    """

    tiered = True
    placement: Placement

    def __init__(
        self,
        config: ModelConfig,
        plan: LayerPlan,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        placement: Placement,
        pool: HostPool,
        backend: str = "auto",
        donor: TieredBank | None = None,
        rows_alone: bool = False,
    ) -> None:
        super().__init__(config, capacity, dtype, device)
        capacity = self.capacity
        self._config, self.placement, self.pool = config, placement, pool
        self._rows_alone = rows_alone
        layers = placement.layers
        resident = None if donor is None else donor._resident
        given = config, plan, capacity, dtype, device
        chunk = placement.chunk
        self._resident: DeviceBank = DeviceBank(
            *given, offloaded=layers, donor=resident, chunk=chunk, rows_alone=rows_alone
        )
        # unpinned rows go through the CPU
        readable = pool.pinned or self.device.type == "cpu"
        self._backend = backend if readable else "reference"
        self.recurrent = self._resident.recurrent
        self._fetch_stream = SideStream(self.device)
        self._write_stream = SideStream(self.device)

        part = part_bytes(config, dtype.itemsize)
        self._layout = layout = RowLayout(self.kv_heads, self.widths, part, self.dtype, self.device)
        groups = placement.offload_groups
        host = HostRows(groups, part, pool, capacity, self.device, self._backend)
        self.table: BlockTable = host.table
        self._sets = [WorkingSet(group, placement, layout, capacity, host) for group in groups]
        self._set_of = {layer: ws for ws in self._sets for layer in ws.group}
        self._writer = WriteBack(host, self._sets, layout, placement.chunk, self._write_stream)
        reader = RowReader(host, self._writer, self._set_of)
        self._blocks = BlockStream(
            reader, self._writer, layout, layers, placement.block, self._fetch_stream
        )
        parts = reader, self._writer, self._blocks, layout, layers
        sizes = placement.staged_layers, capacity
        self._whole = WholeLayers(*parts, *sizes, self._fetch_stream, placement.whole_rows)
        self._cached: CachedBlocks | None = None
        if placement.cache is not None:
            kept = layers, placement.cache, capacity, layout, host, reader
            self._cached = CachedBlocks(*kept)
        self._ring_stop = 0  # one past the newest position in the rings; 0: they are empty
        # between steps: the layers whose rings hold positions first .. stop-1 all the same
        self._kept: dict[int, tuple[int, int]] = {}
        self._refilled = 0  # bytes read from host memory into the rings
        streams = (self._fetch_stream, self._write_stream)
        self._end = weakref.finalize(self, _give_back, self.table, streams, self.device)

    # ---------------------------------------------------------------- sizes

    @property
    def host_length(self) -> int:
        """Positions below are in host memory, or on their way."""
        return self._writer.host_length

    @property
    def length(self) -> int:
        return max(self.host_length, self._ring_stop)

    @property
    def nbytes(self) -> int:
        return (
            self._resident.nbytes
            + self.table.nbytes
            + self._writer.nbytes
            + self._blocks.nbytes
            + self._whole.nbytes
            + sum(ws.nbytes for ws in self._sets)
            + (0 if self._cached is None else self._cached.nbytes)
        )

    @property
    def host_nbytes(self) -> int:
        return self.table.host_nbytes

    def counters(self) -> dict[int, tuple[int, ...]]:
        """As Bank's, read from the device in one copy."""
        if not self._sets:
            return {}
        found = [ws.counters() for ws in self._sets]
        if self._cached is not None:  # groups of one layer, without slots of their own
            found = [self._cached.counters(ws.group[0]) for ws in self._sets]
        rows = torch.stack(found).tolist()
        return {ws.group[0]: tuple(row) for ws, row in zip(self._sets, rows)}

    def figures(self) -> dict[str, object]:
        streamed = self._blocks.streamed + int(self._blocks.moved) + self._whole.streamed
        streamed += self._refilled + (0 if self._cached is None else self._cached.streamed)
        return super().figures() | dict(
            host_bytes=self.host_nbytes,
            pin_seconds=self.pool.pin_seconds,
            bytes_streamed=streamed,
            staging_stalls=self._writer.stalls,
            **counted(self.counters()),
        )

    @property
    def ring_bytes(self) -> int:
        return self._resident.ring_bytes

    def window_ring(self, layer: int) -> WindowRing | None:
        return self._resident.window_ring(layer)

    def holds(self, length: int) -> bool:
        return self._resident.holds(length)

    # ---------------------------------------------------------------- where layers live

    def on_host(self, layer: int) -> bool:
        return self.row_layers[layer] in self._set_of

    def must_stream(self, layer: int, backend: str) -> bool:
        """Whether an offloaded layer is not staged whole, and either longer than a stream block or
        one of many that come over in every step: the next one's first block then comes ahead.

        Never on the reference launchers: there rows are brought together, so that placement cannot
        change a bit.
        """
        return (
            self.on_host(layer)
            and self.row_layers[layer] not in self._whole.staged
            and backend != "reference"
            and (self.length > self.placement.block or not self.placement.budget)
        )

    def capturable(self, *, fetches: bool) -> bool:
        """Only fetches of selections from pinned memory can be captured: their lengths stay on the
        device.
        """
        return fetches and self.pool.pinned

    # ---------------------------------------------------------------- writing

    def step_rows(self, layer: int) -> StepRows:
        ws = self._set_of.get(layer)
        return self._resident.step_rows(layer) if ws is None else ws.step_rows(layer)

    def write_chunk(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int, backend: str = "auto"
    ) -> None:
        if not self.on_host(layer):
            self._resident.write_chunk(layer, k, v, start, backend)
            return
        if self.row_layers[layer] != layer:
            return
        self._writer.begin_chunk(start, start + k.shape[1])
        # a chunk does not pass through the ring: it is read back when decode begins, unless
        # `keep_newest` puts it there
        if self._ring_stop:
            first = tail_start(self._ring_stop, self.placement.ring - 2 * TAIL_BLOCK)
            self._kept = dict.fromkeys(self._set_of, (first, self._ring_stop))
        self._ring_stop = 0
        self._writer.write_chunk(layer, k[0], v[0], start, backend)

    def reserve(self, n: int) -> None:
        """Make room in host memory for n tokens. Raises OutOfHostMemory, nothing changed."""
        self._writer.reserve(min(self.host_length, n), n)

    def write_back(self, stop: int) -> None:
        """Write positions host_length .. stop-1 back to the host from the rings."""
        self._writer.write_ring(stop)

    # ---------------------------------------------------------------- reading

    def kv(self, layer: int, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.on_host(layer):
            return self._resident.kv(layer, stop)
        layer = self.row_layers[layer]
        return self._whole.kv(layer, self.length if stop is None else min(stop, self.length))

    def rows(self, layer: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.row_layers[layer]
        ws = self._set_of.get(layer)
        if ws is None:
            return self._resident.rows(layer, first, stop)
        newest, tail = self._ring_stop, self.placement.ring - 2 * TAIL_BLOCK
        low, high = self._kept.get(layer, (0, 0))
        if newest:
            low, high = tail_start(newest, tail), newest
        if low <= first and stop <= high:
            return ws.views(layer, first, stop)
        return self._whole.rows(layer, first, stop)

    def listed(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.on_host(layer):
            return self._resident.listed(layer, tokens)
        return self._whole.listed(self.row_layers[layer], tokens)

    def block_rows(
        self, layer: int, first: int, blocks: torch.Tensor, stop: int, cache: BlockCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._cached is None or not self.on_host(layer):
            return super().block_rows(layer, first, blocks, stop, cache)
        self.write_back(stop)  # where windows are short the newest block may be in the ring only
        # race: rows may still be on their way to the host
        wait(self._writer.event, self.device)
        return self._layout.views(self._cached.read(self.row_layers[layer], first, blocks))

    def keep_newest(self, layer: int, start: int, stop: int) -> None:
        layer = self.row_layers[layer]
        ws = self._set_of.get(layer)
        if ws is None:
            return
        low, high = self._kept.get(layer, (start, start))
        first = max(start, stop - ws.ring)
        # race: the ring's rows before the chunk may still be on their way to the host
        wait(self._writer.past_event(layer), self.device)
        ws.fill(layer, first, self._blocks.newest(layer, first, stop))
        self._kept[layer] = max(low, stop - ws.ring) if high == start else first, stop

    def stage_layer(self, layer: int) -> None:
        if self.on_host(layer):
            self._whole.stage(self.row_layers[layer])

    def blocks(
        self, layer: int, start: int, stop: int, size: int | None = None, ahead: bool = True
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        if not self.on_host(layer):
            return self._resident.blocks(layer, start, stop, size or self.placement.block)
        return self._blocks.blocks(self.row_layers[layer], start, stop, size, ahead)

    @property
    def room(self) -> int:  # type: ignore[override]
        return self.placement.block

    def gathered(
        self, layer: int, wanted: Sequence[PromptRows], following: int | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        # rows that were decoded since and are read again may be in the ring only
        self.write_back(wanted[0].begin)
        following = None if following is None else self.row_layers[following]
        return self._blocks.gathered(self.row_layers[layer], wanted, following)

    def newest_rows(self, layer: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.on_host(layer):
            return self._resident.newest_rows(layer, first, stop)
        return self._blocks.newest_rows(self.row_layers[layer], first, stop)

    def fetch(self, layers: Sequence[int], index: torch.Tensor, counts: torch.Tensor) -> None:
        ws = self._set_among(layers)
        if ws is not None:
            ws.fetch(index[0, 0], counts, self._fetch_stream)

    def wait_fetched(self, layers: Sequence[int]) -> None:
        ws = self._set_among(layers)
        if ws is not None:
            for layer in ws.group:
                ws.ready(layer)

    def _set_among(self, layers: Sequence[int]) -> WorkingSet | None:
        """The working set of the layers of one group, of which some may read rows of layers that
        stay on the device; None where none is offloaded.
        """
        held = (self._set_of.get(self.row_layers[layer]) for layer in layers)
        return next((ws for ws in held if ws is not None and ws.group[0] in layers), None)

    def selected(
        self,
        layer: int,
        index: torch.Tensor,
        counts: torch.Tensor,
        tail_start: torch.Tensor,
        step: Step,
        fetched: bool = True,
    ) -> SparseRows:
        layer = self.row_layers[layer]
        ws = self._set_of.get(layer)
        if ws is None:
            return self._resident.selected(layer, index, counts, tail_start, step)
        if not fetched:
            return self._whole.gather(layer, index, counts, tail_start, self.length)
        return ws.selected(layer, counts, tail_start, step)

    def picked(
        self,
        layer: int,
        index: torch.Tensor,
        counts: torch.Tensor,
        tail_start: torch.Tensor,
        step: Step,
    ) -> SparseRows:
        if not self.on_host(layer):
            return self._resident.picked(layer, index, counts, tail_start, step)
        return self._whole.pick(self.row_layers[layer], index, counts, tail_start, self.length)

    def picked_values(self, layer: int, index: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        if not self.on_host(layer):
            return self._resident.picked_values(layer, index, counts)
        return self._whole.pick_values(self.row_layers[layer], index, counts)

    def bring(
        self,
        layers: Sequence[int],
        index: torch.Tensor,
        counts: torch.Tensor,
        tail_start: torch.Tensor,
    ) -> None:
        ws = self._set_among(layers)
        if ws is not None:
            self._whole.bring(ws.group, index, counts, tail_start, self.length)

    # ---------------------------------------------------------------- around a prompt, a step

    def preparing(self, n: int) -> contextlib.AbstractContextManager[None]:
        more = -(-n // TAIL_BLOCK) - len(self.table.blocks)
        return self.pool.ahead(self.table.block_bytes, more, self.device)

    def before_step(self, n: int) -> None:
        """Make room in host memory, have the tail in the rings, and wait for older write-backs."""
        self._resident.before_step(n)
        self._whole.drop_brought()
        self._writer.reserve(self.host_length, n)
        if n % TAIL_BLOCK == 0:
            # Race: this step's selection may hold the block that was written back 64 steps ago, and
            # it begins to overwrite the ring where an older one was copied from. Only now: a wait
            # in the step behind the copy would be seen.
            wait(self._writer.event, self.device)
        if self._ring_stop == 0 and self.host_length:
            self._refill(min(n, self.host_length))
        self._ring_stop, self._kept = n, {}

    def after_step(self, n: int) -> None:
        """Write a block back that is now complete."""
        if n % TAIL_BLOCK == 0:
            self.write_back(n)

    @contextlib.contextmanager
    def replaying(self, n: int, new: int = 1) -> Iterator[None]:
        """As Bank's. The rings are filled for n tokens; the next step fills them for the true
        length again. new: rows that a step writes; 0 where it writes them elsewhere.
        """
        length = self.length
        self.write_back(length)
        self._refill(n - new)

        def restore() -> None:
            self._writer.host_length, self._ring_stop, self._kept = length, 0, {}

        try:
            # the steps' new row is read from the ring, where they write it
            self._writer.host_length, self._ring_stop = n - new, n
            with self._resident.replaying(n) if new else contextlib.nullcontext():
                yield
        finally:
            complete(restore)

    def _refill(self, length: int) -> None:
        """Bring the tail of `length` tokens back into the rings."""
        first = tail_start(length, self.placement.ring - 2 * TAIL_BLOCK)
        # race: the rows may still be on their way to the host
        wait(self._writer.event, self.device)
        for ws in self._sets:
            kept = [self._kept.get(layer, (0, 0)) for layer in ws.group]
            if any(low > first or high < length for low, high in kept):
                self._refilled += ws.refill(first, min(length, self.host_length))
        self._kept = {}

    # ---------------------------------------------------------------- going back, copies, end

    def rewind(self, n: int, broken: bool = False) -> None:
        self._resident.rewind(n)
        if not broken and n >= self.length and not self._blocks.prefetching:
            return
        # race: a plan that is still to run would promise its rows after the maps were emptied
        self.drain()
        # between a plan and its copy the maps promise rows that never came: start with empty slots
        if broken:
            self._forget(0)
        self.table.cut(n)
        self._kept = {}
        if n < self.host_length:
            self._forget(n)
            self._writer.host_length, self._ring_stop = n, 0
        elif self._ring_stop:
            self._ring_stop = min(self._ring_stop, n)
        self._writer.forget_staged()
        self._blocks.forget()
        self._whole.forget()

    def _forget(self, length: int) -> None:
        for ws in self._sets:
            ws.forget(length)
        if self._cached is not None:
            self._cached.forget(length)

    def drain(self) -> None:
        """Wait on the host until both side streams are empty."""
        self._fetch_stream.synchronize()
        self._write_stream.synchronize()

    def copy_from(self, other: Bank, length: int) -> None:
        """Share the host blocks of a bank with the same offload groups and pool; copy the rest."""
        shared = (
            isinstance(other, TieredBank)
            and other.placement.offload_groups == self.placement.offload_groups
            and other.pool is self.pool
        )
        self._resident.copy_recurrent(other)
        for layer in self.attending:
            if self.row_layers[layer] != layer:
                continue
            if self._rows_alone and layer not in self.keeping:
                continue
            if not self.on_host(layer) and not other.on_host(layer):
                self._resident.copy_layer(layer, other, length)
            elif not shared:
                for first, k, v in other.blocks(layer, 0, length, self.placement.chunk):
                    self.write_chunk(layer, k.transpose(1, 2), v.transpose(1, 2), first)
        if shared:
            assert isinstance(other, TieredBank)
            other.write_back(length)
            # race: this bank's streams know nothing of the other's
            other.drain()
            self.table.share(other.table, length)
            self._writer.host_length, self._ring_stop = length, 0

    def relayout(self, plan: LayerPlan, placement: Placement | None = None) -> TieredBank:
        """Return this bank where offloaded rows may stay where they are, else a new one that was
        given them, beside this one: host memory holds both until one is closed.
        """
        if placement is None or placement == self.placement:
            self._resident.relayout(plan)
            return self
        self.write_back(self.length)
        self.drain()
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
            rows_alone=self._rows_alone,
        )
        try:
            new.copy_from(self, self.host_length)
        except BaseException:
            new.close()
            raise
        return new

    def close(self) -> None:
        """Give all memory back, once every transfer in flight has landed."""
        if (alive := self._end.peek()) is not None:
            _, give_back, given, _ = alive
            complete(partial(give_back, *given))
            self._end.detach()  # only now: an interrupt would leave what is never given back
        for part in (self._resident, self._writer, self._blocks, self._whole):
            part.close()
        if self._cached is not None:
            self._cached.close()
        self._sets, self._set_of = [], {}


def _give_back(table: BlockTable, streams: Sequence[SideStream], device: torch.device) -> None:
    for stream in streams:
        # race: freed memory would still be read or written by a transfer
        stream.synchronize()
    # race: the transfers of a replayed graph run on none of these streams
    synchronize(device)
    table.cut(0)
