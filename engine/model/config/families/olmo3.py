"""OLMo 3: OLMo 2's block, with windows in three of four layers that keep the unscaled rope.

Reads `attention_bias`, `layer_types` (missing: every fourth layer sees all), `sliding_window`, and
a second rope for the sliding layers where `rope_parameters` has one for each layer type; where
`rope_scaling` stretches the rope, only layers that see all follow it. Expects what OLMo 2 has.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.config.block import Facts
from engine.model.config.families import olmo2
from engine.model.config.family import (
    FULL,
    SLIDING,
    Family,
    Sizes,
    layer_ropes,
    layer_types,
    sliding_rope,
    window,
    windows,
)
from engine.model.config.fields import Fields
from engine.model.config.rope_config import RopeRules

PATTERN = 4  # every fourth layer sees everything
WINDOW = 4096  # tokens, where the file names none
THETA = 5e5


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    types = layer_types(fields, sizes.layers) or tuple(
        SLIDING if (layer + 1) % PATTERN else FULL for layer in range(sizes.layers)
    )
    return replace(
        olmo2.FAMILY.facts(fields, sizes),
        windows=windows(fields, sizes, types, window(fields) or WINDOW),
        layer_ropes=layer_ropes(
            types, sliding_rope(fields, sizes, "rope_theta", THETA), sizes.rope
        ),
    )


FAMILY = Family(
    "OLMo 3", {"Olmo3ForCausalLM": "olmo3"}, _facts, rope=RopeRules(theta=THETA, nested=FULL)
)
