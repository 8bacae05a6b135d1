"""What a model family is to the parser of config.json, and what several families read alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.model.config.block import Facts
from engine.model.config.fields import Fields
from engine.model.config.latent import Latent
from engine.model.config.rope_config import MAX_THETA, Rope, RopeRules, parse_rope

FULL, SLIDING = "full_attention", "sliding_attention"
RECURRENT = "linear_attention"
MOST_HEADS, MOST_DIM = 1 << 16, 1024  # far beyond any released model
# a model with a vision tower: where its config.json has the language model's fields, and where its
# file has those weights
TEXT_CONFIG, TEXT_TENSORS = "text_config", "model.language_model."
# fields that such a file may have outside
_OUTER = ("tie_word_embeddings", "quantization_config", "compression_config", "architectures")
_EITHER = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id")


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
    tensors know (engine/model/tensors.py). towers: those of `architectures` that have a vision
    tower, of which the language model alone is read. intermediate, eps: the keys of the MLP's width
    and of what a norm adds to a mean square. layers: counts them where no field does. latent: reads
    the sizes of latent attention; None: the family has none.
    """

    name: str
    architectures: Mapping[str, str]
    facts: Callable[[Fields, Sizes], Facts]
    tied: bool = False
    head_dim: int | None = None
    activation: tuple[str, tuple[str, ...]] = ("hidden_act", ("silu", "swish"))
    rope: RopeRules = field(default=RopeRules())
    quantised: tuple[str, ...] = ()
    towers: tuple[str, ...] = ()
    intermediate: str = "intermediate_size"
    eps: str = "rms_norm_eps"
    layers: Callable[[Fields], int] | None = None
    latent: Callable[[Fields], Latent] | None = None

    def text_part(self, architecture: str, fields: Fields) -> tuple[dict[str, Any], str]:
        """Return (the language model's fields, what stands before their keys in messages)."""
        data = fields.data
        if architecture not in self.towers:
            return data, ""
        inner = data.get(TEXT_CONFIG)
        if not isinstance(inner, dict):
            fields.refuse(TEXT_CONFIG, inner, "an object: the language model's fields")
        outer = {key: data[key] for key in _OUTER if data.get(key) is not None}
        either = {key: data[key] for key in _EITHER if data.get(key) is not None}
        return {**either, **inner, **outer}, TEXT_CONFIG + "."

    def prefix(self, architecture: str) -> str:
        """Return what begins the stored names of the layers' tensors."""
        return TEXT_TENSORS if architecture in self.towers else "model."


def window(fields: Fields) -> int | None:
    """Return sliding_window in tokens, None where there is none."""
    return fields.integer("sliding_window", 1, 1 << 31, default=None)


def layer_types(
    fields: Fields, layers: int, other: str = SLIDING, renamed: Mapping[str, str] = {}
) -> tuple[str, ...] | None:
    """Return layer_types, checked: "full_attention" or `other` for every layer; None where the
    field is missing. renamed: older names of the two.
    """
    found = fields.data.get("layer_types")
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != layers:
        count = f"a list of {len(found)}" if isinstance(found, list) else found
        fields.refuse("layer_types", count, f"a list of {layers} names, one for each layer")
    types = tuple(renamed.get(name, name) if isinstance(name, str) else name for name in found)
    for name in types:
        if name not in (FULL, other):
            fields.unsupported("layer_types", name, f"{FULL} or {other}")
    return types


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


def shared_rows(fields: Fields, types: tuple[str, ...]) -> tuple[int, ...]:
    """Return whose K and V each layer reads: of the last `num_kv_shared_layers` the newest layer of
    the same type before them, of others their own; () where none shares.
    """
    count = len(types)
    shared = fields.integer("num_kv_shared_layers", 0, count - 1, default=0)
    if not shared:
        return ()
    own = count - shared
    found = list(range(own))
    for layer in range(own, count):
        before = [i for i in range(own) if types[i] == types[layer]]
        if not before:
            expected = f"fewer: no layer before them is of type {types[layer]}"
            fields.refuse("num_kv_shared_layers", shared, expected)
        found.append(before[-1])
    return tuple(found)


def heads_of_type(
    fields: Fields, types: tuple[str, ...], kind: str, usual: int, kv_too: bool
) -> tuple[int, int]:
    """Return (K/V heads, head_dim) of the layers of type `kind`: of `per_layer_config`, else
    `global_head_dim` (or the usual) and, if kv_too, `num_global_key_value_heads`. Layers of a type
    must be alike, and other types as the model.
    """
    heads = fields.integer("num_key_value_heads", 1, MOST_HEADS)
    by_layer = fields.data.get("per_layer_config")
    if by_layer is None:
        width = fields.integer("global_head_dim", 2, MOST_DIM, default=usual)
        if kv_too:
            heads = fields.integer("num_global_key_value_heads", 1, MOST_HEADS, default=heads)
    else:
        width, heads = _alike(fields, by_layer, types, kind, heads)
    if width % 2:
        fields.refuse("global_head_dim", width, "an even number: rope rotates pairs")
    return heads, width


def _alike(
    fields: Fields, by_layer: object, types: tuple[str, ...], kind: str, heads: int
) -> tuple[int, int]:
    """Return (head_dim, K/V heads) that `per_layer_config` gives every layer of type `kind`."""
    expected = f"head_dim for every {kind} layer, all alike, and for no other"
    wanted = {str(i) for i, name in enumerate(types) if name == kind}
    if not isinstance(by_layer, dict) or set(by_layer) != wanted:
        fields.unsupported("per_layer_config", by_layer, expected)
    changes = list(by_layer.values())
    first = changes[0]
    known = {"head_dim", "num_key_value_heads"}
    if not isinstance(first, dict) or any(c != first for c in changes) or not set(first) <= known:
        fields.unsupported("per_layer_config", first, expected)
    inner = Fields(first, fields.source, f"{fields.prefix}per_layer_config.")
    width = inner.integer("head_dim", 2, MOST_DIM)
    return width, inner.integer("num_key_value_heads", 1, MOST_HEADS, default=heads)
