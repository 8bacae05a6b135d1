"""The bank of a session that forgets: K and V of the chunk or step under way, and nothing else.

What stays of them is in the store of an evicting method (engine/methods/evict/shared/store.py). A
method that cuts at a prompt's end leaves the prompt's rows here until then; one that evicts as it
reads leaves no more than a chunk, and its segment. A layer's rows are freed as soon as its store
has what it wants of them, and on a CPU the system has them back at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from engine.bank.base import Bank, SparseRows, Step, StepRows
from engine.bank.pool.heap_limit import HeapLimit
from engine.bank.window_ring import DEFAULT_CHUNK, WindowRing, window_rings
from engine.base.errors import SettingError
from engine.base.interrupts import complete, put_back
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.placement import Placement
from kernels.native.own_pages import empty_on
from kernels.rows.forms import stored, stored_keys

STEP = 1  # tokens of a step of an evicting method


@dataclass
class Waiting:
    """K and V [B, Hkv, rows, width] of a layer's positions low .. high-1, and room for more.
    touched: rows that were written to at some time.
    """

    k: torch.Tensor
    v: torch.Tensor
    low: int
    high: int
    touched: int = field(init=False)

    def __post_init__(self) -> None:
        self.touched = self.high - self.low

    @property
    def stop(self) -> int:
        """One past the last position that there is room for."""
        return self.low + self.k.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of both sides."""
        return self.k.nbytes + self.v.nbytes

    @property
    def untouched(self) -> int:
        """Bytes of rows that nothing was written to yet."""
        rows = self.k.shape[2]
        return self.nbytes // rows * (rows - self.touched)

    def wrote(self, stop: int) -> None:
        """Note that positions up to stop-1 are written."""
        self.high = stop
        self.touched = max(self.touched, stop - self.low)

    def views(self, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of positions first .. stop-1."""
        at = slice(first - self.low, stop - self.low)
        return self.k[:, :, at], self.v[:, :, at]

    def copy(self) -> Waiting:
        """Return a copy that shares nothing."""
        return Waiting(self.k.clone(), self.v.clone(), self.low, self.high)

    def drop(self, n: int) -> None:
        """Let positions below n go; those above move to the front."""
        rest = max(0, self.high - n)
        for side in (self.k, self.v):
            side[:, :, :rest] = side[:, :, n - self.low : self.high - self.low].clone()
        self.low, self.high = n, n + rest


class ChunkBank(Bank):
    """K and V of positions that no store has taken yet, on one device. span: the most rows of a
    layer that wait at once; chunk: the most that a prompt's chunk writes. Sliding-window layers
    keep their rings. Rows that several layers read wait until the last of them has its store. heap:
    on a CPU, how far the process may grow before what lies free in the heap is given back, together
    with the banks of a model's other parts. None: any number.

    source: another bank that holds all rows and is read instead, while a session changes over.
    Models with recurrent layers or latent attention have no such bank: methods that evict refuse
    them.
    """

    forgets = lacks = True
    source: Bank | None = None

    def __init__(
        self,
        config: ModelConfig,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        batch: int = 1,
        span: int = DEFAULT_CHUNK,
        chunk: int = DEFAULT_CHUNK,
        heap: HeapLimit | None = None,
    ) -> None:
        super().__init__(config, capacity, dtype, device, batch)
        self._heap = heap if self.device.type == "cpu" else None
        self.span = min(span, self.capacity)
        self._stop = 0  # where the prompt that is being read ends
        self._waiting: list[Waiting | None] = [None] * self.num_layers
        shape = batch, self.kv_heads, self.widths
        self._newest = {
            layer: WindowRing(STEP, STEP, shape, self.dtype, self.device) for layer in self.keeping
        }
        sizes = chunk, self.capacity, batch
        self._windows = window_rings(config, *sizes, self.dtype, self.device)
        self._last_reader = {rows: layer for layer, rows in enumerate(self.row_layers)}

    @property
    def nbytes(self) -> int:
        waiting = sum(held.nbytes for held in self._waiting if held)
        return waiting + sum(ring.nbytes for ring in self._newest.values()) + self.ring_bytes

    @property
    def ring_bytes(self) -> int:
        return sum(ring.nbytes for ring in self._windows.values())

    def window_ring(self, layer: int) -> WindowRing | None:
        if self.source is not None:
            return self.source.window_ring(layer)
        return self._windows.get(self.row_layers[layer])

    def holds(self, length: int) -> bool:
        return all(ring.holds(length) for ring in self._windows.values())

    # ---------------------------------------------------------------- writing

    def _room(self, layer: int, start: int, stop: int) -> Waiting:
        """Have room for positions start .. stop-1: for the whole prompt at once, as far as the span
        goes, and for the step that cuts it.
        """
        held = self._waiting[layer]
        if held is not None and held.low <= start and stop <= held.stop:
            return held
        low = start if held is None or start < held.low else held.low
        rows = max(stop - low, min(self.span, self._stop + STEP - low))
        elements = rows * self.batch * self.kv_heads * sum(self.widths)
        memory = empty_on((elements,), self.dtype, self.device)
        at = rows * self.batch * self.kv_heads * self.widths[0]
        shape = self.batch, self.kv_heads, rows, -1
        k, v = memory[:at].view(shape), memory[at:].view(shape)
        new = Waiting(k, v, low, start)
        if held is not None and low < start:
            for mine, theirs in zip(new.views(low, start), held.views(low, start)):
                mine.copy_(theirs)
        self._waiting[layer] = new
        return new

    def keep_heap(self) -> None:
        """As Bank's; looked at in each layer."""
        if self._heap is not None:
            untouched = sum(held.untouched for held in self._waiting if held is not None)
            self._heap.keep(untouched, id(self))

    def write_chunk(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int, backend: str = "auto"
    ) -> None:
        self.keep_heap()
        if self.row_layers[layer] != layer:
            return
        if layer in self._windows:
            self._windows[layer].write_chunk(k, v, start, backend)
            return
        stop = start + k.shape[1]
        held = self._room(layer, start, stop)
        held_k, held_v = held.views(start, stop)
        held_k.copy_(stored_keys(k, held_k, backend).transpose(1, 2))
        held_v.copy_(stored(v, held_v, backend).transpose(1, 2))
        held.wrote(stop)

    def step_rows(self, layer: int) -> StepRows:
        held = self._waiting[layer]
        if held is not None:  # a prompt that the step's end cuts
            return StepRows(held.k, held.v)
        ring = self._windows.get(layer) or self._newest[layer]
        return StepRows(ring.k, ring.v, (0, ring.size))

    # ---------------------------------------------------------------- reading

    def rows(self, layer: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.source is not None:
            return self.source.rows(layer, first, stop)
        layer = self.row_layers[layer]
        held = self._waiting[layer]
        if held is not None and held.low <= first and stop <= held.stop:
            return held.views(first, stop)
        if held is None and stop - first <= STEP:
            return self._newest[layer].views(first, stop)
        raise SettingError(
            f"forget: found rows {first} to {stop - 1} of layer {layer} gone, which a method that "
            "forgets frees; read the tokens again, or use forget=False"
        )

    def kv(self, layer: int, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        if self.source is not None:
            return self.source.kv(layer, stop)
        held = self._waiting[self.row_layers[layer]]
        return self.rows(layer, 0, stop or (held.stop if held is not None else self.capacity))

    def blocks(
        self, layer: int, start: int, stop: int, size: int | None = None, ahead: bool = True
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        if self.source is not None:
            yield from self.source.blocks(layer, start, stop, size, ahead)
            return
        size = size or max(1, stop - start)
        for first in range(start, stop, size):
            yield first, *self.rows(layer, first, min(stop, first + size))

    def newest_rows(self, layer: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.rows(layer, first, stop)

    def selected(
        self,
        layer: int,
        index: torch.Tensor,
        counts: torch.Tensor,
        tail_start: torch.Tensor,
        step: Step,
        fetched: bool = True,
    ) -> SparseRows:
        return SparseRows(*self.kv(layer), index, counts, tail_start, step.visible)

    def on_host(self, layer: int) -> bool:
        return self.source is not None and self.source.on_host(layer)

    def must_stream(self, layer: int, backend: str) -> bool:
        return self.source is not None and self.source.must_stream(layer, backend)

    # ---------------------------------------------------------------- forgetting

    def forget(self, layer: int, n: int) -> None:
        self.keep_heap()
        rows = self.row_layers[layer]
        held = self._waiting[rows]
        if held is None or self.source is not None or self._last_reader[rows] != layer:
            return
        if n >= held.high and n >= self._stop:
            self._waiting[rows] = None
        elif n > held.low:
            held.drop(n)

    @contextlib.contextmanager
    def preparing(self, n: int) -> Iterator[None]:
        self._stop = n
        try:
            yield
        finally:
            complete(self._prepared)

    def _prepared(self) -> None:
        self._stop = 0
        for layer, held in enumerate(self._waiting):
            if held is not None and held.low >= held.high:
                self._waiting[layer] = None

    def read_from(self, source: Bank) -> None:
        self.source = source

    def settle(self, first: int, length: int) -> None:
        source = self.source
        assert source is not None
        for layer, ring in self._windows.items():
            other = source.window_ring(layer)
            assert other is not None, f"layer {layer} keeps no window"
            ring.copy_from(other, length)
        if first < length:
            for layer in self.keeping:
                held = self._room(layer, first, length + STEP)
                for mine, theirs in zip(
                    held.views(first, length), source.rows(layer, first, length)
                ):
                    mine.copy_(theirs)
                held.wrote(length)
        self.source = None

    # ---------------------------------------------------------------- around a step, copies, end

    def relayout(self, plan: LayerPlan, placement: Placement | None = None) -> ChunkBank:
        return self

    def before_step(self, n: int) -> None:
        for ring in self._windows.values():
            ring.note(n)
        for layer, held in enumerate(self._waiting):
            if held is not None:
                self._room(layer, n - 1, n)

    @contextlib.contextmanager
    def replaying(self, n: int) -> Iterator[None]:
        # a step's row has a place of its own, but for those of windows
        views = [view for ring in self._windows.values() for view in ring.rows_of(n - 1)]
        with put_back(views):
            yield

    def rewind(self, n: int, broken: bool = False) -> None:
        for ring in self._windows.values():
            ring.rewind(n)
        for layer, held in enumerate(self._waiting):
            if held is not None and n <= held.low:
                self._waiting[layer] = None
            elif held is not None:
                held.high = min(held.high, n)

    def copy_from(self, other: Bank, length: int) -> None:
        assert isinstance(other, ChunkBank)
        for layer, held in enumerate(other._waiting):
            self._waiting[layer] = None if held is None else held.copy()
        for layer, ring in self._windows.items():
            theirs = other.window_ring(layer)
            assert theirs is not None, f"layer {layer} keeps no window"
            ring.copy_from(theirs, length)

    def close(self) -> None:
        self._waiting, self._newest, self._windows, self.source = [], {}, {}, None
