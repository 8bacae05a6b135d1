"""Phi-3, Phi-3.5 and Phi-4 (mini and 14B): stored fused, rotated in part, stretched by LongRoPE.

Expects qkv_proj and gate_up_proj, the tensors that the other families are fused to when they load.
Reads `partial_rotary_factor`, `sliding_window` (all layers) and a rope of kind longrope, which
older files call su or yarn. No biases.
"""

from __future__ import annotations

from engine.model.config.block import Block, Facts
from engine.model.config.family import SLIDING, Family, Sizes, window, windows
from engine.model.config.fields import Fields
from engine.model.config.rope_config import RopeRules


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    size = window(fields)
    types = (SLIDING,) * (sizes.layers if size else 0)
    return Facts(Block(fused=True), windows=windows(fields, sizes, types, size))


FAMILY = Family(
    "Phi-3",
    {"Phi3ForCausalLM": "phi3"},
    _facts,
    rope=RopeRules(
        kinds=("longrope",), renamed={"su": "longrope", "yarn": "longrope"}, partial=True
    ),
)
