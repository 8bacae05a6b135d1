"""OLMo 2: norms after the halves of a layer instead of before, and one norm over all heads of q
(and of k) before rotation.

Reads `attention_bias` (q, k, v and o). Expects post_attention_layernorm and
post_feedforward_layernorm, q_norm and k_norm. A norm's weight multiplies in float32.
"""

from __future__ import annotations

from engine.model.config.block import Block, Facts
from engine.model.config.family import Family, Sizes
from engine.model.config.fields import Fields


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    return Facts(
        Block(qk_norm="width", norms="after", wide_norm=True),
        attention_bias=fields.flag("attention_bias", default=False),
    )


FAMILY = Family("OLMo 2", {"Olmo2ForCausalLM": "olmo2"}, _facts)
