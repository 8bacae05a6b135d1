"""PyramidKV: SnapKV with a budget that falls linearly from the first layer to the last, its sum
unchanged.

Source: Cai et al., PyramidKV (2024): with C the budget, W the window and N the prompt, the last
layer keeps (C - W) / beta tokens beside its window, the first 2 (C - W) less that, at most N - W
(what the first cannot use goes to the last). Default beta 20; window and pooling as SnapKV's
(Ada-KV's setting for both). With beta 1 it is SnapKV.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.base.checks import integer
from engine.methods.evict.snapkv import SnapKV
from engine.plan.layers import LayerPlan


@dataclass(frozen=True)
class PyramidKV(SnapKV):
    """beta: how many times fewer tokens than the mean the last layer keeps."""

    full_prompts = True

    beta: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("beta", self.beta, 1)

    def budgets(self, plan: LayerPlan, length: int) -> list[int]:
        """Falling, with the sum of equal ones up to one token a layer."""
        layers = len(plan.all.partial_layers)
        found = pyramid(layers, self.budget(plan, length), length, self.window, self.beta)
        return plan.own(found)


def pyramid(layers: int, budget: int, length: int, window: int, beta: int) -> list[int]:
    """Budgets of all layers, the window included."""
    base, room = budget - window, length - window
    if layers == 1 or base >= room:
        return [budget] * layers
    low = base // beta
    high = 2 * base - low
    if high >= room:
        high, low = room, 2 * base - room
    return [high - layer * (high - low) // (layers - 1) + window for layer in range(layers)]
