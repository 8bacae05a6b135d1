"""A rank's part of a context bank that is split by context: the rows of its own tokens, in the
order of their positions (engine/model/config/share.py), in either tier. What is no token's alone
lies whole on every rank: rings of sliding windows, and the state of recurrent layers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import NoReturn

import torch

from engine.bank.base import Bank, SparseRows, Step, StepRows
from engine.bank.device import DeviceBank
from engine.bank.host.tiered import TieredBank
from engine.bank.pool.host_pool import HostPool
from engine.bank.window_ring import DEFAULT_CHUNK, WindowRing
from engine.base.errors import OutOfHostMemory, SettingError
from engine.model.config.config import ModelConfig
from engine.model.config.share import LANDING
from engine.plan.layers import LayerPlan
from engine.plan.placement import Placement
from kernels.rows.forms import as_bytes


class ContextBank(Bank):
    """The rows of the tokens that config.context names. Every rank computes the rows of all tokens,
    and a bank drops those of others: of a chunk at once, of a step in `landed`.

    own: the bank of this rank's rows, numbered from 0 on, with the layers of `placement` in the
    host memory of `pool`. said: gives a number of every rank. Callers pass positions. No call shows
    rows by position: most are elsewhere. One sequence, and steps of up to LANDING tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: LayerPlan,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        chunk: int = DEFAULT_CHUNK,
        placement: Placement | None = None,
        pool: HostPool | None = None,
        backend: str = "auto",
        said: Callable[[int], Sequence[Sequence[int]]] = lambda number: [[number]],
    ) -> None:
        super().__init__(config, capacity, dtype, device)
        assert config.context is not None, "a model that is not split by context"
        self.share, self._config, self._said = config.context, config, said
        given = config, plan, self.share.rows(self.capacity), dtype, device
        self.own: DeviceBank | TieredBank
        if placement is None:
            self.own = DeviceBank(*given, chunk=chunk, rows_alone=True)
        else:
            assert pool is not None
            self.own = TieredBank(*given, placement, pool, backend, rows_alone=True)
        every, whole = range(self.num_layers), (config, plan, self.capacity, dtype, device)
        self._whole = DeviceBank(*whole, offloaded=every, chunk=chunk)
        self.recurrent = self._whole.recurrent
        # one kernel writes a step's rows and its queries, and knows of no rank
        shape = 1, self.kv_heads, self.widths
        self._landing = WindowRing(1, LANDING, shape, self.dtype, self.device)
        self._landed = -1  # the layer whose rows of a step lie there

    # ---------------------------------------------------------------- sizes

    @property
    def nbytes(self) -> int:
        return self.own.nbytes + self._whole.nbytes + self._landing.nbytes

    @property
    def host_nbytes(self) -> int:
        return self.own.host_nbytes

    @property
    def ring_bytes(self) -> int:
        return self._whole.ring_bytes

    @property
    def tiered(self) -> bool:  # type: ignore[override]
        return self.own.tiered

    @property
    def placement(self) -> Placement | None:  # type: ignore[override]
        return self.own.placement

    def counters(self) -> dict[int, tuple[int, ...]]:
        return self.own.counters()

    def figures(self) -> dict[str, object]:
        """As Bank's, of this rank: what it holds on the device of the rows that it holds."""
        row_bytes = self.kv_heads * sum(self.widths) * self.dtype.itemsize
        own = len(self.keeping) * self.own.capacity * row_bytes + self._whole.nbytes
        resident = self.nbytes / (own + self._landing.nbytes)
        found = self.own.figures() if self.keeping else {}
        return found | dict(bank_bytes=self.nbytes, resident=resident)

    def here(self, length: int) -> tuple[Bank, int]:
        return self.own, self.share.count(length)

    def on_host(self, layer: int) -> bool:
        return self.own.on_host(layer)

    def capturable(self, *, fetches: bool) -> bool:
        """Never: which rank takes a step's rows is decided on the host."""
        return False

    # ---------------------------------------------------------------- windows

    def window_ring(self, layer: int) -> WindowRing | None:
        return self._whole.window_ring(layer)

    def holds(self, length: int) -> bool:
        return self._whole.holds(length)

    # ---------------------------------------------------------------- writing

    def step_rows(self, layer: int) -> StepRows:
        """A place for the step's rows of any layer, which `landed` empties; a ring's own."""
        if self.window_ring(layer) is not None:
            return self._whole.step_rows(layer)
        self._landed = layer
        k, v = self._landing.k, self._landing.v
        return StepRows(k, v if self.widths[1] else k, (0, LANDING))

    def landed(self, layer: int, step: Step) -> None:
        if layer != self._landed:  # it reads another's rows, or looks once more at those before
            return
        self._landed = -1
        stop = step.lengths[0]
        k, v, twice = self.own.step_rows(layer)
        sides = ((k, self._landing.k), (v, self._landing.v))[: 1 + bool(self.widths[1])]
        for position in range(stop - step.positions.shape[1], stop):
            if not self.share.holds(position):
                continue
            row = self.share.count(position)
            places = [row]
            if twice is not None:
                first, size = twice
                places = [first + row % size, first + size + row % size]
            for mine, landing in sides:
                for place in places:
                    as_bytes(mine)[:, :, place] = as_bytes(landing)[:, :, position % LANDING]

    def write_chunk(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int, backend: str = "auto"
    ) -> None:
        if self.window_ring(layer) is not None:
            self._whole.write_chunk(layer, k, v, start, backend)
            return
        if layer == self.keeping[0]:
            self._make_room(start + k.shape[1])
        held = self.share.held(torch.arange(start, start + k.shape[1], device=k.device))
        if bool(held.any()):
            row = self.share.count(start)
            self.own.write_chunk(layer, k[:, held], v[:, held], row, backend)

    def _make_room(self, n: int) -> None:
        """Make room in host memory for n tokens, on all ranks or on none: where one has none left,
        all raise OutOfHostMemory.
        """
        if not isinstance(self.own, TieredBank):
            return
        failed: OutOfHostMemory | None = None
        try:
            self.own.reserve(self.share.count(n))
        except OutOfHostMemory as error:
            failed = error
        if not all(well for (well,) in self._said(failed is None)):
            raise failed or OutOfHostMemory("another rank's host memory is full")

    def keep_newest(self, layer: int, start: int, stop: int) -> None:
        first, last = self.share.count(start), self.share.count(stop)
        if first < last:
            self.own.keep_newest(layer, first, last)

    # ---------------------------------------------------------------- reading

    def fetch(self, layers: Sequence[int], index: torch.Tensor, counts: torch.Tensor) -> None:
        """As Bank's: this rank's part of a selection."""
        self.own.fetch(layers, *self.part_of(index, counts))

    def wait_fetched(self, layers: Sequence[int]) -> None:
        self.own.wait_fetched(layers)

    def part_of(
        self, index: torch.Tensor, counts: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's rows of the positions index int32 [1, 1, K], of which counts [1] say how many
        there are: (rows, as many, -1 behind the last; counts).
        """
        own = self.share.rows_of(index[0, 0, : int(counts)])
        rows = torch.full_like(index, -1)
        rows[0, 0, : len(own)] = own
        return rows, torch.full_like(counts, len(own))

    def kv(self, layer: int, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        self._elsewhere()

    def blocks(
        self, layer: int, start: int, stop: int, size: int | None = None, ahead: bool = True
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        self._elsewhere()

    def newest_rows(self, layer: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._elsewhere()

    def selected(
        self,
        layer: int,
        index: torch.Tensor,
        counts: torch.Tensor,
        tail_start: torch.Tensor,
        step: Step,
        fetched: bool = True,
    ) -> SparseRows:
        self._elsewhere()

    def _elsewhere(self) -> NoReturn:
        """Raise SettingError: whoever asks for rows by position has to run on one process."""
        raise SettingError(
            f"split_by: found 'context' over {self.share.ranks} ranks, of which none has the rows "
            "that this reads; use split_by='heads' or one process"
        )

    # ---------------------------------------------------------------- around a step, copies, end

    def relayout(self, plan: LayerPlan, placement: Placement | None = None) -> ContextBank:
        own = self.own.relayout(plan, placement)
        if own is self.own:
            return self
        new, every = copy.copy(self), range(self.num_layers)
        given = self._config, plan, self.capacity, self.dtype, self.device
        new.own, new._whole = own, DeviceBank(*given, offloaded=every, donor=self._whole)
        return new

    def preparing(self, n: int) -> AbstractContextManager[None]:
        return self.own.preparing(self.share.count(n))

    def before_step(self, n: int) -> None:
        self._landed = -1  # of a step that was interrupted
        self._make_room(n)
        self.own.before_step(self.share.count(n))
        self._whole.before_step(n)

    def after_step(self, n: int) -> None:
        if self.share.holds(n - 1):
            self.own.after_step(self.share.count(n))

    @contextlib.contextmanager
    def replaying(self, n: int) -> Iterator[None]:
        rows, own = self.share.count(n), self.own
        with ExitStack() as held:
            held.enter_context(self._whole.replaying(n))
            if self.share.holds(n - 1):
                held.enter_context(own.replaying(rows))
            elif isinstance(own, TieredBank):
                held.enter_context(own.replaying(rows, new=0))
            yield

    def rewind(self, n: int, broken: bool = False) -> None:
        self._landed = -1
        self.own.rewind(self.share.count(n), broken)
        self._whole.rewind(n)

    def copy_from(self, other: Bank, length: int) -> None:
        assert isinstance(other, ContextBank), "a bank of another split"
        self.own.copy_from(other.own, self.share.count(length))
        self._whole.copy_from(other._whole, length)

    def close(self) -> None:
        self.own.close()
        self._whole.close()
        self.recurrent = None
