"""A device bank in which K/V heads that share logits with a lower layer hold the K of the first and
of the newest tokens only (PoD, engine/methods/select/pod.py); the others, and V, are whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from engine.bank.base import Bank, Step, StepRows
from engine.bank.device import DeviceBank
from engine.bank.near.near_rows import NearRows
from engine.bank.window_ring import DEFAULT_CHUNK, WindowRing
from engine.base.interrupts import put_back
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import RING, NearKeys
from engine.plan.placement import near_rows

STEP = 1  # tokens of a step of PoD


class NearBank(DeviceBank):
    """K and V of all layers on one device, without the K that `near` names. chunk: the most tokens
    of a prefill chunk. Models with sliding windows, recurrent layers or latent attention have none.
    """

    lacks = overwrites = True
    in_place = False

    def __init__(
        self,
        config: ModelConfig,
        plan: LayerPlan,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str,
        near: NearKeys,
        batch: int = 1,
        chunk: int = DEFAULT_CHUNK,
    ) -> None:
        short = {layer: heads for layer, heads in enumerate(near.heads) if heads}
        super().__init__(config, plan, capacity, dtype, device, batch, offloaded=short, chunk=chunk)
        rows = near_rows(near, chunk, self.capacity)
        shape = batch, self.kv_heads, self.capacity, self.widths
        one = batch, self.kv_heads, self.widths
        self._landing = {
            layer: WindowRing(STEP, STEP, one, self.dtype, self.device) for layer in short
        }
        self._near = {
            layer: NearRows(heads, near.first, near.recent, rows, shape, self.dtype, self.device)
            for layer, heads in short.items()
        }

    def _of(self, layer: int) -> NearRows | None:
        return self._near.get(self.row_layers[layer])

    @property
    def nbytes(self) -> int:
        landing = sum(ring.nbytes for ring in self._landing.values())
        return super().nbytes + landing + sum(rows.nbytes for rows in self._near.values())

    def holds(self, length: int) -> bool:
        return all(rows.holds(length, RING) for rows in self._near.values())

    # ---------------------------------------------------------------- writing

    def step_rows(self, layer: int) -> StepRows:
        """Of a layer with near heads a place of its own, which `landed` empties: one kernel writes
        K and V of all heads, as if they were alike.
        """
        ring = self._landing.get(layer)
        return super().step_rows(layer) if ring is None else StepRows(ring.k, ring.v, (0, STEP))

    def landed(self, layer: int, step: Step) -> None:
        ring = self._landing.get(layer)
        if ring is not None:
            k, v = (side[:, :, :STEP].transpose(1, 2) for side in (ring.k, ring.v))
            self._near[layer].write(k, v, step.positions, "auto")

    def write_chunk(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int, backend: str = "auto"
    ) -> None:
        rows = self._near.get(layer)
        if rows is None:
            super().write_chunk(layer, k, v, start, backend)
            return
        stop = start + k.shape[1]
        positions = torch.arange(start, stop, device=self.device).expand(len(k), -1)
        rows.note(stop)
        rows.write(k, v, positions, backend)

    # ---------------------------------------------------------------- reading

    def kv(self, layer: int, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """As Bank.kv, up to where near heads have K; raises SettingError where some of it is
        gone.
        """
        rows = self._of(layer)
        if rows is None:
            return super().kv(layer, stop)
        stop = rows.fitting(stop)
        return rows.keys(0, stop), rows.v[:, :, :stop]

    def values(self, layer: int) -> torch.Tensor:
        rows = self._of(layer)
        return super().values(layer) if rows is None else rows.v

    def head_keys(
        self, layer: int, head: int, first: int, stop: int
    ) -> list[tuple[int, torch.Tensor]]:
        rows = self._of(layer)
        if rows is None:
            return super().head_keys(layer, head, first, stop)
        return rows.head_keys(head, first, stop)

    def newest_rows(self, layer: int, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._of(layer)
        if rows is None:
            return super().newest_rows(layer, first, stop)
        return rows.keys(first, stop), rows.v[:, :, first:stop]

    # ---------------------------------------------------------------- around a step, copies, end

    def before_step(self, n: int) -> None:
        super().before_step(n)
        for rows in self._near.values():
            rows.note(n)

    @contextlib.contextmanager
    def replaying(self, n: int) -> Iterator[None]:
        views = [view for rows in self._near.values() for view in rows.views(n - 1)]
        with super().replaying(n), put_back(views):
            yield

    def rewind(self, n: int, broken: bool = False) -> None:
        super().rewind(n, broken)
        for rows in self._near.values():
            rows.rewind(n)

    def copy_from(self, other: Bank, length: int) -> None:
        super().copy_from(other, length)
        for layer, rows in self._near.items():
            if isinstance(other, NearBank):
                rows.copy_from(other._near[layer], length)
            else:
                rows.load(*other.kv(layer, length))

    def close(self) -> None:
        super().close()
        self._near, self._landing = {}, {}
