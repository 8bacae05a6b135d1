"""What a model family is to the parser of config.json, and what several families read alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from engine.model.config.block import Facts
from engine.model.config.fields import Fields
from engine.model.config.rope_config import MAX_THETA, Rope, RopeRules, parse_rope

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Sizes:
    """What is known before a family reads its own fields: sizes and the main rope."""

    layers: int
    hidden: int
    head_dim: int
    positions: int
    rope: Rope


@dataclass(frozen=True)
class Family:
    """One family: its names and defaults, and the function that reads what is its own.

    architectures: architecture -> model_type, for a config.json that names only one of the two.
    tied, head_dim: defaults, those of transformers' configuration. activation: its key and accepted
    names. rope: what its rope may be. quantised: methods of quantization_config that its own
    tensors know (engine/model/tensors.py).
    """

    name: str
    architectures: Mapping[str, str]
    facts: Callable[[Fields, Sizes], Facts]
    tied: bool = False
    head_dim: int | None = None
    activation: tuple[str, tuple[str, ...]] = ("hidden_act", ("silu", "swish"))
    rope: RopeRules = field(default=RopeRules())
    quantised: tuple[str, ...] = ()


def window(fields: Fields) -> int | None:
    """Return sliding_window in tokens, None where there is none."""
    return fields.integer("sliding_window", 1, 1 << 31, default=None)


def layer_types(fields: Fields, layers: int) -> tuple[str, ...] | None:
    """Return layer_types, checked: "full_attention" or "sliding_attention" for every layer; None
    where the field is missing.
    """
    found = fields.data.get("layer_types")
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != layers:
        fields.refuse("layer_types", found, f"a list of {layers} names, one for each layer")
    for name in found:
        if name not in (FULL, SLIDING):
            fields.unsupported("layer_types", name, f"{FULL} or {SLIDING}")
    return tuple(found)


def windows(
    fields: Fields, sizes: Sizes, types: tuple[str, ...], size: int | None
) -> tuple[int, ...]:
    """Return every layer's window: `size` for a sliding layer, 0 for another; () where none
    slides.

    A window that no context of the model fills is none.
    """
    if SLIDING not in types:
        return ()
    if size is None:
        fields.refuse("sliding_window", None, f"a number of tokens: layer_types has {SLIDING}")
    if size >= sizes.positions:
        return ()
    return tuple(size if name == SLIDING else 0 for name in types)


def sliding_rope(fields: Fields, sizes: Sizes, key: str, theta: float) -> Rope:
    """Return the rope of the sliding layers: that of `rope_parameters` for their type, else an
    unscaled one of base `key` (theta where it is missing).
    """
    nested = fields.data.get("rope_parameters")
    if isinstance(nested, dict) and SLIDING in nested:
        rules = RopeRules(theta=theta, nested=SLIDING)
        data = {"rope_parameters": nested}
        return parse_rope(data, fields.source, sizes.positions, sizes.head_dim, rules)
    return Rope("default", fields.number(key, 1.0, MAX_THETA, default=theta))


def layer_ropes(types: tuple[str, ...], sliding: Rope, full: Rope) -> tuple[Rope, ...]:
    """Return the rope of each layer by its type; () where both are one."""
    if sliding == full:
        return ()
    return tuple(sliding if name == SLIDING else full for name in types)
