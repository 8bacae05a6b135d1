"""SmolLM3: Llama's block, with layers that rotate nothing (NoPE).

Reads `no_rope_layers` (1: the layer rotates, 0: it does not) or, without it,
`no_rope_layer_interval`; `attention_bias` and `mlp_bias`. Layers without rope may slide.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.config.block import Facts
from engine.model.config.family import FULL, SLIDING, Family, Sizes, layer_types, window, windows
from engine.model.config.fields import Fields
from engine.model.config.rope_config import RopeRules


def _rotates(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Return for every layer whether it rotates q and k."""
    found = fields.data.get("no_rope_layers")
    if found is None:
        interval = fields.integer("no_rope_layer_interval", 1, 1 << 20, default=4)
        return tuple((layer + 1) % interval != 0 for layer in range(layers))
    if not isinstance(found, list) or len(found) < layers:
        fields.refuse("no_rope_layers", found, f"a list of {layers} times 0 or 1")
    for value in found:
        if type(value) is not int or value not in (0, 1):
            fields.refuse("no_rope_layers", value, "0 (no rope) or 1 for each layer")
    return tuple(value == 1 for value in found[:layers])


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    rotates = _rotates(fields, sizes.layers)
    size = window(fields) if fields.flag("use_sliding_window", default=False) else None
    types = layer_types(fields, sizes.layers) or tuple(
        FULL if turns or size is None else SLIDING for turns in rotates
    )
    still = replace(sizes.rope, kind="none", factor=1.0, attention_factor=1.0)
    return Facts(
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        windows=windows(fields, sizes, types, size),
        layer_ropes=tuple(sizes.rope if turns else still for turns in rotates),
    )


FAMILY = Family(
    "SmolLM3", {"SmolLM3ForCausalLM": "smollm3"}, _facts, tied=True, rope=RopeRules(theta=2e6)
)
