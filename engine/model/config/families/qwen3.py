"""Qwen3, dense: RMSNorm of every head of q and k before rotation, an explicit head_dim.

Reads `attention_bias` (q, k, v and o) and the same sliding fields as Qwen2. Expects q_norm and
k_norm of head_dim weights in every layer.
"""

from __future__ import annotations

from engine.model.config.block import Block, Facts
from engine.model.config.families.qwen2 import sliding
from engine.model.config.family import Family, Sizes
from engine.model.config.fields import Fields


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    return Facts(
        Block(qk_norm="head"),
        attention_bias=fields.flag("attention_bias", default=False),
        windows=sliding(fields, sizes),
    )


FAMILY = Family("Qwen3", {"Qwen3ForCausalLM": "qwen3"}, _facts, head_dim=128)
