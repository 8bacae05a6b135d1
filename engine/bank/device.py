"""The device tier of the context bank: contiguous K and V at the planned capacity.

On a CPU every layer is head-major: a sparse layer's rows cost about the same gathered from either
layout, and below the method's crossover it is read whole, 1.3x to 2.6x as fast head-major. On a GPU
a layer whose rows are gathered is token-major with K and V adjacent, so that a row is one run of
memory. Callers see [B, Hkv, T, D] views of either and never learn which.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch

from engine.bank.base import Bank, SparseRows, Step, StepRows
from engine.bank.recurrent.state import RecurrentState
from engine.bank.window_ring import DEFAULT_CHUNK, WindowRing, window_rings
from engine.base.interrupts import put_back
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.placement import Placement
from kernels.layer.native_step import copy_rows
from kernels.native.pages import enlarge
from kernels.rows.forms import stored, stored_keys

BLOCK = 65536  # tokens of a block that `blocks` yields
# Bytes of one head's K from which a layer lies in large pages. A quarter of such a page: a short
# session does not hold 2 MB of each head for a few rows.
LARGE = 512 << 10


class LayerRows(NamedTuple):
    """K and V of a layer: views [B, Hkv, T, width] of one memory, whose widths are those of
    Bank.widths. token_major: it is [batch, capacity, K of every head and then V], else K [batch,
    kv_heads, capacity, width] and then V. Where V is K it is the same view, and nothing follows.
    """

    k: torch.Tensor
    v: torch.Tensor
    token_major: bool

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return self.k.nbytes + (0 if self.v is self.k else self.v.nbytes)


class DeviceBank(Bank):
    """K and V of all layers on one device, but for those in `offloaded`: nothing is reserved for
    them. Sliding-window layers keep a ring of their newest rows, which takes prefill chunks of up
    to `chunk` tokens.

    Reserves layers * batch * capacity * kv_heads * (both widths) elements at construction; a CPU
    commits pages as they are written. donor: a bank of the same model that hands its layers over.
    rows_alone: rings and the state of recurrent layers lie in another bank.
    """

    in_place = True

    def __init__(
        self,
        config: ModelConfig,
        plan: LayerPlan,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        batch: int = 1,
        offloaded: Collection[int] = (),
        donor: DeviceBank | None = None,
        chunk: int = DEFAULT_CHUNK,
        rows_alone: bool = False,
    ) -> None:
        super().__init__(config, capacity, dtype, device, batch)
        self._rings: dict[int, WindowRing] = {} if donor is None else donor._rings
        if donor is None and not rows_alone:
            sizes = chunk, self.capacity, batch
            self._rings = window_rings(config, *sizes, self.dtype, self.device)
        if donor is not None:
            self.recurrent = donor.recurrent
        elif config.recurrent is not None and not rows_alone:
            self.recurrent = RecurrentState(config.recurrent, dtype, self.device, batch)
        self._layers: list[LayerRows | None] = [None] * self.num_layers
        self._large_from = LARGE // (self.widths[0] * self.dtype.itemsize)  # tokens
        self._small: set[int] = set(range(self.num_layers))  # layers in pages as they come
        for layer in self.keeping:
            if layer in offloaded:
                continue
            handed = None if donor is None else donor._layers[layer]
            self._layers[layer] = handed or self._reserve(self._wants_token_major(plan, layer))
        if donor is not None:
            self.relayout(plan)

    def _wants_token_major(self, plan: LayerPlan, layer: int) -> bool:
        readers = [i for i, rows in enumerate(self.row_layers) if rows == layer]
        return all(map(plan.gathers, readers)) and self.device.type != "cpu"

    def _reserve(self, token_major: bool) -> LayerRows:
        heads, at = self.kv_heads, self.kv_heads * self.widths[0]
        tokens, both = self.batch * self.capacity, self.kv_heads * sum(self.widths)
        memory = torch.empty(tokens * both, dtype=self.dtype, device=self.device)
        if token_major:
            rows = memory.view(self.batch, self.capacity, both)
            parts = [rows[..., :at], rows[..., at:]] if self.widths[1] else [rows]
            sides = [part.unflatten(2, (heads, -1)).transpose(1, 2) for part in parts]
            return LayerRows(sides[0], sides[-1], True)
        shape = self.batch, heads, self.capacity, -1
        parts = [memory[: tokens * at], memory[tokens * at :]] if self.widths[1] else [memory]
        sides = [part.view(shape) for part in parts]
        return LayerRows(sides[0], sides[-1], False)

    @property
    def nbytes(self) -> int:
        more = 0 if self.recurrent is None else self.recurrent.nbytes
        return sum(held.nbytes for held in self._layers if held) + self.ring_bytes + more

    @property
    def ring_bytes(self) -> int:
        return sum(ring.nbytes for ring in self._rings.values())

    def window_ring(self, layer: int) -> WindowRing | None:
        return self._rings.get(self.row_layers[layer])

    def holds(self, length: int) -> bool:
        return all(ring.holds(length) for ring in self._rings.values())

    # ---------------------------------------------------------------- writing and reading

    def step_rows(self, layer: int) -> StepRows:
        ring = self._rings.get(layer)
        if ring is not None:
            return StepRows(ring.k, ring.v, (0, ring.size))
        return StepRows(*self.kv(layer))

    def write_chunk(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int, backend: str = "auto"
    ) -> None:
        if self.row_layers[layer] != layer:
            return
        ring = self._rings.get(layer)
        if ring is not None:
            ring.write_chunk(k, v, start, backend)
            return
        bank_k, bank_v = self.kv(layer)
        stop = start + k.shape[1]
        self._enlarge(layer, stop, start)
        new_k = stored_keys(k, bank_k, backend).transpose(1, 2)
        copy_rows(bank_k[:, :, start:stop], new_k, backend)
        if bank_v is not bank_k:
            new_v = stored(v, bank_v, backend).transpose(1, 2)
            copy_rows(bank_v[:, :, start:stop], new_v, backend)

    def _enlarge(self, layer: int, length: int, written: int) -> None:
        """Put a layer into large pages once a session of `length` tokens is worth them; `written`
        of them are joined now.
        """
        if length < self._large_from or layer not in self._small:
            return
        self._small.discard(layer)
        held = self._layers[layer]
        if held is not None and not held.token_major and held.k.device.type == "cpu":
            for side in dict.fromkeys(held[:2]):
                enlarge(side, written)

    def kv(self, layer: int, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        held = self._layers[self.row_layers[layer]]
        assert held is not None, f"layer {layer} is not on the device"
        k, v = held.k, held.v
        return (k, v) if stop in (None, k.shape[2]) else (k[:, :, :stop], v[:, :, :stop])

    def rows(self, layer: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.kv(layer)
        return k[:, :, first:stop], v[:, :, first:stop]

    def blocks(
        self, layer: int, start: int, stop: int, size: int | None = None, ahead: bool = True
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        k, v = self.kv(layer)
        size = size or BLOCK
        for first in range(start, stop, size):
            last = min(stop, first + size)
            yield first, k[:, :, first:last], v[:, :, first:last]

    def newest_rows(self, layer: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self.kv(layer, stop)
        return k[:, :, first:], v[:, :, first:]

    def selected(
        self,
        layer: int,
        index: torch.Tensor,
        counts: torch.Tensor,
        tail_start: torch.Tensor,
        step: Step,
        fetched: bool = True,
    ) -> SparseRows:
        return SparseRows(*self.kv(layer, step.bucket), index, counts, tail_start, step.visible)

    # ---------------------------------------------------------------- other plans, copies, end

    def relayout(self, plan: LayerPlan, placement: Placement | None = None) -> DeviceBank:
        """Put every layer into the memory layout that `plan` wants; `placement` changes nothing."""
        for layer in range(self.num_layers):
            held, want = self._layers[layer], self._wants_token_major(plan, layer)
            if held is None or held.token_major == want:
                continue
            new = self._reserve(want)
            for mine, theirs in zip(new[:2], held[:2]):
                mine.copy_(theirs)
            self._small.add(layer)
            self.moves += 1
            self._layers[layer] = new  # whole: an interrupt finds one layout or the other
        return self

    def copy_from(self, other: Bank, length: int) -> None:
        for layer in range(self.num_layers):
            if self._layers[layer] is not None or layer in self._rings:
                self.copy_layer(layer, other, length)
        self.copy_recurrent(other)

    def copy_recurrent(self, other: Bank) -> None:
        """Copy the state of the recurrent layers from another bank."""
        if self.recurrent is not None and other.recurrent is not None:
            self.recurrent.copy_from(other.recurrent)

    def copy_layer(self, layer: int, other: Bank, length: int) -> None:
        """Copy one layer's first `length` tokens from another bank."""
        ring, theirs_ring = self._rings.get(layer), other.window_ring(layer)
        if ring is not None and theirs_ring is not None:
            ring.copy_from(theirs_ring, length)
            return
        for mine, theirs in zip(self.kv(layer, length), other.kv(layer, length)):
            mine.copy_(theirs)

    def close(self) -> None:
        self.moves += 1
        self._layers, self._rings, self.recurrent = [], {}, None

    # ---------------------------------------------------------------- around a step

    def before_step(self, n: int) -> None:
        if n >= self._large_from and self._small:
            for layer in tuple(self._small):
                self._enlarge(layer, n, 0)  # joining pages takes a step's time: the system may
        for ring in self._rings.values():
            ring.note(n)

    @contextlib.contextmanager
    def replaying(self, n: int) -> Iterator[None]:
        at = slice(n - 1, n)
        views = [part[:, :, at] for held in self._layers if held for part in held[:2]]
        views += [view for ring in self._rings.values() for view in ring.rows_of(n - 1)]
        if self.recurrent is not None and n <= self.recurrent.length:
            views += self.recurrent.row(n - 1)
        with put_back(views):
            yield

    def rewind(self, n: int, broken: bool = False) -> None:
        for ring in self._rings.values():
            ring.rewind(n)
        if self.recurrent is not None:
            self.recurrent.rewind(n)
