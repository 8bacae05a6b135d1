"""A context bank of one bank for each part of a model, on the part's device.

Steps and chunks of a part work on the part's own bank, whose layers are numbered from 0. What a
session asks of its bank is asked here, and goes to the part that has the layer, or to all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from engine.bank.base import Bank, PromptRows, SparseRows, Step, StepRows
from engine.bank.split.placement import SplitPlacement
from engine.bank.split.split_state import SplitState
from engine.bank.window_ring import WindowRing
from engine.base.device import current
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.split.cut import Cut

Rows = tuple[torch.Tensor, torch.Tensor]


class SplitBank(Bank):
    """The banks `parts` of the parts of a model, which `cut` has made. config: of the whole.

    Rows come back on the device of their layer.
    """

    def __init__(
        self,
        config: ModelConfig,
        cut: Cut,
        parts: Sequence[Bank],
        capacity: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(config, capacity, dtype, cut.devices[0])
        self._config, self._floats = config, dtype
        self.cut, self.parts = cut, tuple(parts)
        states = [part.recurrent for part in parts if part.recurrent is not None]
        self.recurrent = SplitState(states) if states else None
        self._twin: SplitBank | None = None  # a bank that has some of these parts too
        self._closed = False
        self.capacity = max(part.capacity for part in parts)
        self.tiered = any(part.tiered for part in parts)
        self.overwrites = any(part.overwrites for part in parts)
        self.forgets = any(part.forgets for part in parts)
        self.lacks = any(part.lacks for part in parts)
        if self.tiered:
            placements = tuple(part.placement for part in parts)
            self.placement: Any = SplitPlacement(placements, cut.starts)

    def _of(self, layer: int) -> tuple[Bank, int]:
        part, number = self.cut.of(layer)
        return self.parts[part], number

    def _each(self, work: Callable[[Bank], object]) -> None:
        for part in self.parts:
            with current(part.device):
                work(part)

    # ---------------------------------------------------------------- sizes

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def host_nbytes(self) -> int:
        return sum(part.host_nbytes for part in self.parts)

    @property
    def length(self) -> int:
        return next(part.length for part in self.parts if part.tiered)

    def counters(self) -> dict[int, tuple[int, ...]]:
        found = {}
        for part, first in zip(self.parts, self.cut.starts):
            found.update({first + layer: row for layer, row in part.counters().items()})
        return found

    def figures(self) -> dict[str, Any]:
        found: dict[str, Any] = dict(super().figures())
        for part, first in zip(self.parts, self.cut.starts):
            for name, value in part.figures().items():
                if name == "groups" and isinstance(value, dict):
                    moved = {first + layer: row for layer, row in value.items()}
                    found[name] = {**found.get(name, {}), **moved}
                elif name == "pin_seconds":  # of the pool, which all parts share
                    found[name] = value
                elif name not in ("bank_bytes", "resident", "hit_rate"):
                    found[name] = found.get(name, 0) + value
        if "hits" in found:
            found["hit_rate"] = found["hits"] / max(1, found["hits"] + found["misses"])
        return found

    @property
    def ring_bytes(self) -> int:
        return sum(part.ring_bytes for part in self.parts)

    # ---------------------------------------------------------------- rows of a layer

    def step_rows(self, layer: int) -> StepRows:
        bank, number = self._of(layer)
        return bank.step_rows(number)

    def write_chunk(
        self, layer: int, k: torch.Tensor, v: torch.Tensor, start: int, backend: str = "auto"
    ) -> None:
        bank, number = self._of(layer)
        with current(bank.device):
            bank.write_chunk(number, k.to(bank.device), v.to(bank.device), start, backend)

    def kv(self, layer: int, stop: int | None = None) -> Rows:
        bank, number = self._of(layer)
        return bank.kv(number, stop)

    def blocks(
        self, layer: int, start: int, stop: int, size: int | None = None, ahead: bool = True
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        bank, number = self._of(layer)
        # the part's next layer comes ahead, but for its last
        return bank.blocks(number, start, stop, size, ahead and number + 1 < bank.num_layers)

    def rows(self, layer: int, first: int, stop: int) -> Rows:
        bank, number = self._of(layer)
        return bank.rows(number, first, stop)

    def listed(self, layer: int, tokens: torch.Tensor) -> Rows:
        bank, number = self._of(layer)
        return bank.listed(number, tokens.to(bank.device))

    def gathered(
        self, layer: int, wanted: Sequence[PromptRows], following: int | None = None
    ) -> Iterator[Rows]:
        bank, number = self._of(layer)
        return bank.gathered(number, wanted)

    def newest_rows(self, layer: int, first: int, stop: int) -> Rows:
        bank, number = self._of(layer)
        return bank.newest_rows(number, first, stop)

    def selected(
        self,
        layer: int,
        index: torch.Tensor,
        counts: torch.Tensor,
        tail_start: torch.Tensor,
        step: Step,
        fetched: bool = True,
    ) -> SparseRows:
        part, number = self.cut.of(layer)
        given = index, counts, tail_start, step.parts[part], fetched
        return self.parts[part].selected(number, *given)

    def window_ring(self, layer: int) -> WindowRing | None:
        bank, number = self._of(layer)
        return bank.window_ring(number)

    def holds(self, length: int) -> bool:
        return all(part.holds(length) for part in self.parts)

    def on_host(self, layer: int) -> bool:
        bank, number = self._of(layer)
        return bank.on_host(number)

    def must_stream(self, layer: int, backend: str) -> bool:
        bank, number = self._of(layer)
        return bank.must_stream(number, backend)

    def capturable(self, *, fetches: bool) -> bool:
        return all(part.capturable(fetches=fetches) for part in self.parts)

    # ---------------------------------------------------------------- all parts

    def relayout(self, plan: LayerPlan, placement: Any = None) -> Bank:
        """As Bank; a new one shares the parts that stay as they are with this one."""
        wanted = (None,) * len(self.parts) if placement is None else placement.parts
        made: list[Bank] = []
        try:
            for part, own, where in zip(self.parts, self.cut.layers(plan), wanted):
                with current(part.device):
                    made.append(part.relayout(own, where))
        except BaseException:
            for old, new in zip(self.parts, made):
                if new is not old:
                    new.close()
            raise
        if all(new is old for new, old in zip(made, self.parts)):
            return self
        found = SplitBank(self._config, self.cut, made, self.capacity, self._floats)
        found._twin, self._twin = self, found
        return found

    @contextlib.contextmanager
    def preparing(self, n: int) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.preparing(n))
            yield

    def forget(self, layer: int, n: int) -> None:
        bank, number = self._of(layer)
        bank.forget(number, n)

    def keep_heap(self) -> None:
        for part in self.parts:
            part.keep_heap()

    def read_from(self, source: Bank) -> None:
        assert source.parts, "a bank of the same parts"
        for part, theirs in zip(self.parts, source.parts, strict=True):
            part.read_from(theirs)

    def settle(self, first: int, length: int) -> None:
        self._each(lambda part: part.settle(first, length))

    def before_step(self, n: int) -> None:
        self._each(lambda part: part.before_step(n))

    def after_step(self, n: int) -> None:
        self._each(lambda part: part.after_step(n))

    @contextlib.contextmanager
    def replaying(self, n: int) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.parts:
                stack.enter_context(part.replaying(n))
            yield

    def rewind(self, n: int, broken: bool = False) -> None:
        self._each(lambda part: part.rewind(n, broken))

    def copy_from(self, other: Bank, length: int) -> None:
        assert other.parts, "a bank of the same parts"
        for part, theirs in zip(self.parts, other.parts, strict=True):
            if part is not theirs:
                with current(part.device):
                    part.copy_from(theirs, length)

    def close(self) -> None:
        """As Bank. Parts that a bank beside this one has too are its own from now on."""
        others = () if self._twin is None or self._twin._closed else self._twin.parts
        self._closed = True
        for part in self.parts:
            if not any(part is other for other in others):
                with current(part.device):
                    part.close()
