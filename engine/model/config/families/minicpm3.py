"""MiniCPM3: latent attention (engine/model/heads/latent.py) with a plain MLP, and factors of the
embedding, of what a half adds to the residual, and of the logits.

Reads `kv_lora_rank`, `q_lora_rank` (null: queries have no latent), `qk_rope_head_dim`,
`qk_nope_head_dim`, `v_head_dim` (null: hidden_size / num_attention_heads); `scale_emb`,
`scale_depth` and `dim_model_base` (null: none of the last two); `attention_bias`, `mlp_bias`. Rope
may be longrope. Rotated dimensions are stored half after half.
"""

from __future__ import annotations

import math
from dataclasses import replace

from engine.model.config.block import Block, Facts
from engine.model.config.family import Family, Sizes
from engine.model.config.fields import Fields
from engine.model.config.latent import Latent, bias, read_latent, score
from engine.model.config.rope_config import LONGROPE, RopeRules


def _latent(fields: Fields) -> Latent:
    hidden, heads = (fields.data.get(key) for key in ("hidden_size", "num_attention_heads"))
    value = hidden // heads if type(hidden) is type(heads) is int and hidden >= heads > 0 else 64
    sizes = read_latent(fields, query_rank=768, value=value, plain=64, turned=32, rank=256)
    return replace(sizes, pairs=False)


def _given(fields: Fields, key: str, usual: float, none: float) -> float:
    """Return a factor: `usual` where the file has no such field, `none` where it is null."""
    return fields.number(key, 0.0, 1e6, default=none if key in fields.data else usual)


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    latent, layers = _latent(fields), math.sqrt(sizes.layers)
    return Facts(
        Block(
            embedding=fields.number("scale_emb", 0.0, 1e6, default=12.0),
            residual=_given(fields, "scale_depth", 1.4, layers) / layers,
            logits=_given(fields, "dim_model_base", 256.0, float(sizes.hidden)) / sizes.hidden,
            score=score(fields, latent),
        ),
        attention_bias=bias(fields, latent),
        mlp_bias=fields.flag("mlp_bias", default=False),
    )


FAMILY = Family(
    "MiniCPM3",
    {"MiniCPM3ForCausalLM": "minicpm3"},
    _facts,
    tied=True,
    rope=RopeRules(kinds=(LONGROPE,)),
    latent=_latent,
)
