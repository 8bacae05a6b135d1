"""Mistral 7B, Nemo, Small 3, Ministral 8B: Llama's block without biases, with or without a window.

Reads `sliding_window`: every layer looks back so many tokens, none if null. A config.json that
leaves it out means 4096 to transformers, which few files intend: it is refused. Ministral names its
sliding layers in `layer_types`.
"""

from __future__ import annotations

from engine.model.config.block import Facts
from engine.model.config.family import SLIDING, Family, Sizes, layer_types, window, windows
from engine.model.config.fields import Fields


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    if "sliding_window" not in fields.data:
        fields.unsupported(
            "sliding_window", "nothing, which means 4096 for Mistral", "null (full attention)"
        )
    size = window(fields)
    types = layer_types(fields, sizes.layers) or (SLIDING,) * (sizes.layers if size else 0)
    return Facts(windows=windows(fields, sizes, types, size))


FAMILY = Family(
    "Mistral", {"MistralForCausalLM": "mistral", "MinistralForCausalLM": "ministral"}, _facts
)
