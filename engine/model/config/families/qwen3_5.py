"""Qwen3.5 and Qwen3.6: three recurrent layers (a gated delta net), then one of gated attention, and
so on; mostly with a vision tower, of which the language model alone is read.

Reads `layer_types`, or `full_attention_interval` without them; `linear_num_key_heads`,
`linear_num_value_heads`, `linear_key_head_dim`, `linear_value_head_dim` and
`linear_conv_kernel_dim`; `attention_bias` (q, k, v and o). A quarter of a head rotates. Of a
checkpoint with a tower it reads text_config, and the tensors behind model.language_model. Expects
linear_attn in a recurrent layer and self_attn in another, whose q_proj holds, head by head, q and
its gate.
"""

from __future__ import annotations

from engine.model.config.block import Block, Facts
from engine.model.config.family import FULL, RECURRENT, Family, Sizes, layer_types
from engine.model.config.fields import Fields
from engine.model.config.rope_config import RopeRules
from engine.model.recurrent import Recurrent

MOST_HEADS = 4096
MOST_DIM = 1024
MOST_TAPS = 5  # of the convolution: as many as a state's rings hold; released models have 4
ROPE = RopeRules(partial=True, rotates=0.25)
BLOCK = Block(qk_norm="head", wide_norm=True, norm_offset=1.0, gated=True)


def recurrent(fields: Fields, sizes: Sizes, interleaved: bool = False) -> Recurrent | None:
    """Return the recurrent layers; None where every layer attends."""
    types = layer_types(fields, sizes.layers, RECURRENT)
    if types is None:
        every = fields.integer("full_attention_interval", 1, 1 << 20, default=4)
        types = tuple(RECURRENT if (i + 1) % every else FULL for i in range(sizes.layers))
    layers = tuple(i for i, kind in enumerate(types) if kind == RECURRENT)
    if not layers:
        return None
    if len(layers) == sizes.layers:
        fields.unsupported("layer_types", RECURRENT, f"{FULL} for one layer at least")
    keys = fields.integer("linear_num_key_heads", 1, MOST_HEADS, default=16)
    values = fields.integer("linear_num_value_heads", 1, MOST_HEADS, default=32)
    if values % keys:
        fields.refuse(
            "linear_num_value_heads", values, f"a multiple of linear_num_key_heads {keys}"
        )
    return Recurrent(
        layers,
        keys,
        values,
        fields.integer("linear_key_head_dim", 1, MOST_DIM, default=128),
        fields.integer("linear_value_head_dim", 1, MOST_DIM, default=128),
        fields.integer("linear_conv_kernel_dim", 2, MOST_TAPS, default=4),
        interleaved,
    )


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    return Facts(
        BLOCK,
        attention_bias=fields.flag("attention_bias", default=False),
        recurrent=recurrent(fields, sizes),
    )


FAMILY = Family(
    "Qwen3.5",
    {"Qwen3_5ForConditionalGeneration": "qwen3_5", "Qwen3_5ForCausalLM": "qwen3_5_text"},
    _facts,
    head_dim=256,
    rope=ROPE,
    towers=("Qwen3_5ForConditionalGeneration",),
)
