"""Granite 3, dense: Llama's block with four factors.

Reads `embedding_multiplier`, `residual_multiplier` (of what each half of a layer adds),
`attention_multiplier` (in place of head_dim ** -0.5) and `logits_scaling` (logits are divided by
it); `attention_bias` and `mlp_bias`.
"""

from __future__ import annotations

from engine.model.config.block import Block, Facts
from engine.model.config.family import Family, Sizes
from engine.model.config.fields import Fields

MOST = 1e6  # far beyond any released factor (12, 0.22, 0.0078125, 16)


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    def factor(key: str) -> float:
        return fields.number(key, 0.0, MOST, default=1.0)

    block = Block(
        embedding=factor("embedding_multiplier"),
        residual=factor("residual_multiplier"),
        logits=1.0 / factor("logits_scaling"),
        score=factor("attention_multiplier"),
    )
    return Facts(
        block,
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
    )


FAMILY = Family("Granite", {"GraniteForCausalLM": "granite"}, _facts)
