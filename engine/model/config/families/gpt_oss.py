"""gpt-oss (20B, 120B): attention sinks, windows in every second layer, biases, and a mixture of
experts with a clamped activation, stored stacked, as floats or in MXFP4 (docs/QUANTISATION.md).

Reads `attention_bias` (q, k, v and o), `layer_types` or every second layer from the first on,
`sliding_window`, `num_local_experts`, `num_experts_per_tok`, `swiglu_limit`, `swiglu_alpha` and
`quantization_config` of method mxfp4. Its rope is YaRN and must be named. Expects self_attn.sinks,
mlp.router with a bias, and the stacked experts with theirs. On a GPU the device chooses a decode
step's experts (kernels/experts), else the host.
"""

from __future__ import annotations

from engine.model.config.block import Block, Facts
from engine.model.config.family import FULL, SLIDING, Family, Sizes, layer_types, window, windows
from engine.model.config.fields import Fields
from engine.model.config.rope_config import RopeRules
from engine.model.mixture import Experts
from kernels.experts.open import Activation
from weights.mxfp4 import COLUMNS

MOST = 4096  # experts of a layer; the largest released has 128
WIDEST = 1 << 20


def _experts(fields: Fields, hidden: int) -> Experts:
    """Return the mixture; every layer has one."""
    count = fields.integer("num_local_experts", 1, MOST)
    width = fields.integer("intermediate_size", 1, WIDEST)
    packed = fields.data.get("quantization_config") is not None
    for key, size in (("hidden_size", hidden), ("intermediate_size", width)):
        if packed and size % COLUMNS:
            fields.refuse(key, size, f"a multiple of {COLUMNS}, the columns of an MXFP4 scale")
    return Experts(
        count,
        fields.integer("num_experts_per_tok", 1, count),
        width,
        normalise=True,
        bias=True,
        activation=Activation(
            "clamped",
            fields.number("swiglu_limit", 0.0, 1e6, default=7.0),
            fields.number("swiglu_alpha", 0.0, 1e3, default=1.702),
        ),
        stored="mxfp4" if packed else "stacked",
    )


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    if not fields.data.get("rope_scaling") and not fields.data.get("rope_parameters"):
        fields.refuse("rope_scaling", None, "an object: gpt-oss has no rope without one")
    types = layer_types(fields, sizes.layers) or tuple(
        FULL if layer % 2 else SLIDING for layer in range(sizes.layers)
    )
    return Facts(
        Block(wide_norm=True, sinks=True),
        attention_bias=fields.flag("attention_bias", default=True),
        windows=windows(fields, sizes, types, window(fields) or 128),
        experts=_experts(fields, sizes.hidden),
    )


FAMILY = Family(
    "gpt-oss",
    {"GptOssForCausalLM": "gpt_oss"},
    _facts,
    head_dim=64,
    rope=RopeRules(theta=150000.0),
    quantised=("mxfp4",),
)
