"""Gemma 3 (text) and Gemma 2: windows in most layers, four norms a layer, norms of 1 + weight.

Reads `layer_types` or `sliding_window_pattern` (every n-th layer sees all), `sliding_window`,
`query_pre_attn_scalar` (its -0.5th power scales scores), `final_logit_softcapping`, and for Gemma 3
a second rope for its sliding layers (`rope_local_base_freq`, or `rope_parameters` by layer type).
The embedding is multiplied by sqrt(hidden_size). Gemma 2 caps attention scores as well
(`attn_logit_softcapping`).
"""

from __future__ import annotations

from engine.model.config.block import Block, Facts
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


def _facts(fields: Fields, sizes: Sizes, pattern: int, gemma3: bool) -> Facts:
    if fields.data.get("use_bidirectional_attention"):
        fields.unsupported("use_bidirectional_attention", True, "false")
    pattern = fields.integer("sliding_window_pattern", 1, 1 << 20, default=pattern)
    types = layer_types(fields, sizes.layers) or tuple(
        SLIDING if (layer + 1) % pattern else FULL for layer in range(sizes.layers)
    )
    block = Block(
        qk_norm="head" if gemma3 else "none",
        norms="both",
        wide_norm=True,
        norm_offset=1.0,
        activation="gelu_tanh",
        embedding=sizes.hidden**0.5,
        logit_cap=_cap(fields, "final_logit_softcapping", 0.0 if gemma3 else 30.0),
        score=fields.number("query_pre_attn_scalar", 0.0, 1e6, default=256.0) ** -0.5,
        score_cap=_cap(fields, "attn_logit_softcapping", 0.0 if gemma3 else 50.0),
    )
    local = sliding_rope(fields, sizes, "rope_local_base_freq", 1e4) if gemma3 else sizes.rope
    return Facts(
        block,
        attention_bias=fields.flag("attention_bias", default=False),
        windows=windows(fields, sizes, types, window(fields) or 4096),
        layer_ropes=layer_ropes(types, local, sizes.rope),
    )


def _cap(fields: Fields, key: str, missing: float) -> float:
    """Return a cap on logits; 0 where it is null."""
    return fields.number(key, 0.0, 1e6, default=0.0) if key in fields.data else missing


_ACTIVATION = ("hidden_activation", ("gelu_pytorch_tanh",))
GEMMA3 = Family(
    "Gemma 3",
    {"Gemma3ForCausalLM": "gemma3_text"},
    lambda fields, sizes: _facts(fields, sizes, 6, True),
    tied=True,
    head_dim=256,
    activation=_ACTIVATION,
    rope=RopeRules(theta=1e6, nested=FULL),
)
GEMMA2 = Family(
    "Gemma 2",
    {"Gemma2ForCausalLM": "gemma2"},
    lambda fields, sizes: _facts(fields, sizes, 2, False),
    tied=True,
    head_dim=256,
    activation=_ACTIVATION,
)
