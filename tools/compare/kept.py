"""Any method with some layers that attend to everything: `--dense-layers-kept`.

OmniKV's filter layers read every token, whatever its budget. Where a model looks things up in one
of those layers, a method that is sparse in all layers loses by that alone; with the same layers
kept it is compared by its choice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from engine.bank.base import Bank, Step
from engine.methods.base import Method, Runtime, Setup
from engine.methods.evict.shared.settings import Evicting
from engine.model.config.config import ModelConfig
from engine.plan.filter_layers import FilterLayers
from engine.plan.layers import Group, LayerPlan, Role
from engine.plan.needs import Needs

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class KeepsDense(Method):
    """`inner` where `layers` attend to everything, in prompts and in answers; the others do as
    `inner` does.

    The method goes on attending in these layers, unread: its time and its store say more than it
    needs, its answers, rows and resident bytes do not (tools/compare/bytes.py).
    """

    inner: Method
    layers: tuple[int, ...]

    named = False

    @property
    def name(self) -> str:
        return self.inner.name

    def completed(self, filter_layers: Callable[[], FilterLayers]) -> Method:
        return replace(self, inner=self.inner.completed(filter_layers))

    def plan(self, config: ModelConfig) -> LayerPlan:
        """The inner plan with these layers FULL; groups lose them, and a group that chose in one of
        them for itself is gone.
        """
        return without(self.inner.plan(config), self.layers)

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        return self.inner.needs(self._inner_plan(plan, config), config, capacity, itemsize)

    def dense_below_tokens(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, device_type: str, capacity: int
    ) -> int:
        return self.inner.dense_below_tokens(plan, config, itemsize, device_type, capacity)

    def validate(self, plan: LayerPlan) -> None:
        self.inner.validate(plan)

    def validate_prompt(self, start: int, stop: int) -> None:
        self.inner.validate_prompt(start, stop)

    def validate_switch(self, length: int) -> None:
        self.inner.validate_switch(length)

    def runtime(self, setup: Setup) -> Runtime:
        plan = self._inner_plan(setup.plan, setup.config)
        runtime = self.inner.runtime(replace(setup, plan=plan))
        runtime.__class__ = kept_class(type(runtime))
        runtime.kept = frozenset(self.layers)  # type: ignore[attr-defined]
        return runtime

    def _inner_plan(self, plan: LayerPlan, config: ModelConfig) -> LayerPlan:
        """What the inner method is told: of one that evicts its own plan, since a kept layer has a
        store all the same, which nothing reads.
        """
        return self.inner.plan(config) if isinstance(self.inner, Evicting) else plan


def without(plan: LayerPlan, layers: tuple[int, ...]) -> LayerPlan:
    """A plan in which `layers` that read less than everything are FULL."""
    kept = set(layers) & set(plan.partial_layers)
    groups = [g for g in plan.groups if g.filter_layer not in kept]
    number = {group: i for i, group in enumerate(groups)}
    group_of = [
        None if layer in kept or group is None else number.get(plan.groups[group])
        for layer, group in enumerate(plan.group_of)
    ]
    left = (
        Group(g.filter_layer, tuple(layer for layer in g.layers if layer not in kept))
        for g in groups
    )
    roles = (Role.FULL if layer in kept else role for layer, role in enumerate(plan.roles))
    return LayerPlan(tuple(roles), tuple(left), tuple(group_of))


class Keeping(Runtime):
    """Goes before a runtime's own class: it attends, and a kept layer's result is replaced by full
    attention's.
    """

    kept: frozenset[int]

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention of a step."""
        out = super().attend(layer, q, step)
        return self.attend_dense(layer, q, step) if layer in self.kept else out

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        """Attention of a chunk."""
        out = super().attend_prompt(layer, q, bank, start)
        return Runtime.attend_prompt(self, layer, q, bank, start) if layer in self.kept else out

    def rows_read(self, n: int) -> list[int]:
        """A kept layer reads everything."""
        rows = super().rows_read(n)
        return [n if layer in self.kept else count for layer, count in enumerate(rows)]


@functools.cache
def kept_class(own: type[Runtime]) -> type[Runtime]:
    """A runtime class with Keeping before it."""
    return type(f"Kept{own.__name__}", (Keeping, own), {})


def inner_of(method: Method) -> Method:
    """The method that KeepsDense wraps, or the method itself."""
    return method.inner if isinstance(method, KeepsDense) else method


def kept_of(method: Method) -> tuple[int, ...]:
    """The layers that KeepsDense keeps, or none."""
    return method.layers if isinstance(method, KeepsDense) else ()
