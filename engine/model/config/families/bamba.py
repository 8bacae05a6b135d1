"""Bamba: recurrent layers of Mamba-2 and some of attention, of whose heads a half rotates.

Reads `attn_layer_indices`; `mamba_n_heads`, `mamba_d_head`, `mamba_n_groups`, `mamba_d_state`,
`mamba_d_conv`, `mamba_expand` and `mamba_conv_bias`; `attention_bias` and `mlp_bias`. Expects mamba
in a recurrent layer, self_attn in another, and feed_forward in each.
"""

from __future__ import annotations

from engine.model.config.block import Facts
from engine.model.config.families.mamba_fields import mamba
from engine.model.config.family import FULL, RECURRENT, Family, Sizes
from engine.model.config.fields import Fields
from engine.model.config.names import Names
from engine.model.config.rope_config import RopeRules

NAMES = Names(norm="final_layernorm", mlp="feed_forward.", after="pre_ff_layernorm")
INDICES = "attn_layer_indices"


def _types(fields: Fields, layers: int) -> tuple[str, ...]:
    found = fields.data.get(INDICES)
    found = [] if found is None else found
    if not isinstance(found, list) or any(type(i) is not int or not 0 <= i < layers for i in found):
        fields.refuse(INDICES, found, f"layer numbers below {layers}")
    return tuple(FULL if i in found else RECURRENT for i in range(layers))


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    width = fields.integer("mamba_expand", 1, 64, default=2) * sizes.hidden
    return Facts(
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        recurrent=mamba(fields, _types(fields, sizes.layers), width, INDICES),
        names=NAMES,
    )


FAMILY = Family(
    "Bamba", {"BambaForCausalLM": "bamba"}, _facts, rope=RopeRules(partial=True, rotates=0.5)
)
