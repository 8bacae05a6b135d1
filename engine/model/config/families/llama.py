"""Llama 1 to 3.3, Yi, SmolLM2, the Llama distillations of DeepSeek-R1: the plain block.

Reads `attention_bias` (q, k, v and o) and `mlp_bias` (gate, up and down).
"""

from __future__ import annotations

from engine.model.config.block import Facts
from engine.model.config.family import Family, Sizes
from engine.model.config.fields import Fields


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    size = fields.data.get("sliding_window")
    if size is not None and fields.data.get("use_sliding_window") is not False:
        fields.unsupported("sliding_window", size, "null (full attention)")
    return Facts(
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
    )


FAMILY = Family(
    "Llama",
    {
        "LlamaForCausalLM": "llama",
        "LLaMAForCausalLM": "llama",  # the spelling of early Llama 1 conversions
        "YiForCausalLM": "Yi",
    },
    _facts,
)
