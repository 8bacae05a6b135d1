"""Models that have sliding windows too: what a method that evicts does in which layer.

Layers that see every token evict. Sliding-window layers forget by the model's own design: they keep
the rings of the bank and attend as under every other method, so that no budget, store or score is
theirs. Lists of a store have a place for them all the same, which is empty: a layer's number is its
place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from engine.base.errors import SettingError
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan, Role, single_layer_groups

T = TypeVar("T")


def evicting_plan(name: str, config: ModelConfig) -> LayerPlan:
    """Return the plan in which the layers that see every token are RETAINED. Raises SettingError of
    the method `name` where no layer does.
    """
    if not config.seeing_layers:
        raise SettingError(
            f"{name}: evicts in layers that see every token, found none: every layer of this model "
            f"slides ({config.family}); use full"
        )
    others = config.local_layers, config.recurrent_layers
    roles = single_layer_groups(config.num_layers, (), *others).roles
    found = tuple(Role.RETAINED if role is Role.FULL else role for role in roles)
    return LayerPlan(found, (), (None,) * config.num_layers)


def spread(plan: LayerPlan, values: Sequence[T], other: T) -> list[T]:
    """Return one value per layer: `values` are those of the layers that evict, ascending."""
    found = [other] * plan.num_layers
    for layer, value in zip(plan.partial_layers, values, strict=True):
        found[layer] = value
    return found


def seeing_alone(config: ModelConfig) -> ModelConfig | None:
    """Return a configuration whose rope is the one that all layers which see every token have; None
    where they have different ones.
    """
    ropes = {config.layer_ropes[layer] for layer in config.seeing_layers if config.layer_ropes}
    if len(ropes) > 1:
        return None
    rope = ropes.pop() if ropes else config.rope
    return replace(config, rope=rope, layer_ropes=(), windows=(), local_heads=None)


def window_positions(config: ModelConfig, layer: int, length: int) -> list[list[int]]:
    """Return the positions that each K/V head of a sliding-window layer sees at `length` tokens."""
    first = max(0, length - config.windows[layer])
    return [list(range(first, length))] * config.heads_of(layer)[0]


def window_rows_bytes(config: ModelConfig, length: int, itemsize: int) -> int:
    """Return the bytes of K and V that the sliding-window layers see of `length` tokens."""
    seen = config.rows_seen(length)
    return sum(seen[i] for i in config.ring_layers) * config.kv_bytes(itemsize, local=True)
