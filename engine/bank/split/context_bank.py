"""A rank's part of a context bank that is split by context: the rows of its own tokens, in the
order of their positions (engine/model/config/share.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import NoReturn

import torch

from engine.bank.base import Bank, SparseRows, Step, StepRows
from engine.bank.device import DeviceBank
from engine.bank.window_ring import DEFAULT_CHUNK, WindowRing
from engine.base.errors import SettingError
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.placement import Placement


class ContextBank(Bank):
    """The rows of the tokens that config.context names. Every rank computes the rows of all tokens,
    and a bank drops those of others: of a chunk at once, of a step in `landed`.

    Callers pass positions, but for `own_rows`, which shows rows as they lie here. No call shows
    rows by position: most are elsewhere. One sequence, and steps of one token.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: LayerPlan,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        chunk: int = DEFAULT_CHUNK,
    ) -> None:
        super().__init__(config, capacity, dtype, device)
        assert config.context is not None, "a model that is not split by context"
        self.share = config.context
        rows = self.share.rows(self.capacity)
        self._own = DeviceBank(config, plan, rows, dtype, device, chunk=chunk)
        # one kernel writes a step's row and its query, and knows of no rank
        shape = 1, self.kv_heads, self.widths
        self._landing = WindowRing(1, 1, shape, self.dtype, self.device)

    @property
    def nbytes(self) -> int:
        return self._own.nbytes + self._landing.nbytes

    # ---------------------------------------------------------------- writing

    def step_rows(self, layer: int) -> StepRows:
        """A place for the step's row of any layer, which `landed` empties."""
        return StepRows(self._landing.k, self._landing.v, (0, 1))

    def landed(self, layer: int, step: Step) -> None:
        assert step.positions.shape[1] == 1, "a step of one token"
        position = step.lengths[0] - 1
        if self.share.holds(position):
            row = self.share.count(position)
            for mine, ring in zip(self.own_rows(layer), (self._landing.k, self._landing.v)):
                mine[:, :, row] = ring[:, :, 0]

    def write_chunk(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int, backend: str = "auto"
    ) -> None:
        held = self.share.held(torch.arange(start, start + k.shape[1], device=k.device))
        if bool(held.any()):
            row = self.share.count(start)
            self._own.write_chunk(layer, k[:, held], v[:, held], row, backend)

    # ---------------------------------------------------------------- reading

    def own_rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [1, Hkv, rows, D] of one layer, of this rank's tokens alone."""
        return self._own.kv(layer)

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
        self._own.relayout(plan)
        return self

    def before_step(self, n: int) -> None:
        self._own.before_step(self.share.count(n))

    def replaying(self, n: int) -> AbstractContextManager[None]:
        if self.share.holds(n - 1):
            return self._own.replaying(self.share.count(n))
        return contextlib.nullcontext()

    def rewind(self, n: int, broken: bool = False) -> None:
        self._own.rewind(self.share.count(n))

    def copy_from(self, other: Bank, length: int) -> None:
        assert isinstance(other, ContextBank), "a bank of another split"
        self._own.copy_from(other._own, self.share.count(length))

    def close(self) -> None:
        self._own.close()
