"""Qwen3-MoE (30B-A3B, 235B-A22B): Qwen3 with a mixture of experts in place of the MLP.

Reads `num_experts` (or num_local_experts), `num_experts_per_tok`, `moe_intermediate_size` (width of
an expert), `norm_topk_prob`, and which layers keep Qwen3's MLP: `mlp_only_layers`, and those that
`decoder_sparse_step` passes over. Expects mlp.gate and every expert's three matrices. On a GPU the
device chooses a decode step's experts (kernels/experts), else the host.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.config.block import Facts
from engine.model.config.families import qwen3
from engine.model.config.family import Family, Sizes
from engine.model.config.fields import Fields
from engine.model.mixture import Experts

MOST = 4096  # experts of a layer; the largest released has 128
WIDEST = 1 << 20


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    key = "num_local_experts" if "num_experts" not in fields.data else "num_experts"
    count = fields.integer(key, 1, MOST)
    experts = Experts(
        count,
        fields.integer("num_experts_per_tok", 1, count),
        fields.integer("moe_intermediate_size", 1, WIDEST),
        fields.flag("norm_topk_prob", default=False),
        plain_layers(fields, sizes.layers),
    )
    return replace(qwen3.FAMILY.facts(fields, sizes), experts=experts)


def plain_layers(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers without experts."""
    step = fields.integer("decoder_sparse_step", 1, 1 << 20, default=1)
    named = fields.data.get("mlp_only_layers")
    named = [] if named is None else named
    if not isinstance(named, list) or not all(type(n) is int and 0 <= n < layers for n in named):
        fields.refuse("mlp_only_layers", named, f"a list of layer numbers below {layers}")
    return tuple(i for i in range(layers) if i in named or (i + 1) % step)


FAMILY = Family("Qwen3-MoE", {"Qwen3MoeForCausalLM": "qwen3_moe"}, _facts, head_dim=None)
