"""Qwen3.5 and Qwen3.6 with a mixture of experts, one of which every token takes.

Reads what Qwen3.5 does, `num_experts`, `num_experts_per_tok`, `moe_intermediate_size` and
`shared_expert_intermediate_size`. Expects mlp.gate, mlp.shared_expert and its gate; where there is
a tower the experts are stacked, else each has its three matrices.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.config.block import Facts
from engine.model.config.families import qwen3_5
from engine.model.config.family import Family, Sizes
from engine.model.config.fields import Fields
from engine.model.mixture import Experts

MOST_EXPERTS = 4096  # of a layer; the largest released has 512
WIDEST = 1 << 20


def experts(fields: Fields, stored: str = "apart", dense: tuple[int, ...] = ()) -> Experts:
    """Return the mixture, whose shares sum to one, with the expert that every token takes."""
    count = fields.integer("num_experts", 1, MOST_EXPERTS)
    return Experts(
        count,
        fields.integer("num_experts_per_tok", 1, count),
        fields.integer("moe_intermediate_size", 1, WIDEST),
        normalise=True,
        dense=dense,
        stored=stored,
        shared=fields.integer("shared_expert_intermediate_size", 1, WIDEST),
    )


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    # messages name the key inside text_config where there is a tower
    stored = "rows" if fields.prefix else "apart"
    return replace(qwen3_5.FAMILY.facts(fields, sizes), experts=experts(fields, stored))


FAMILY: Family = replace(
    qwen3_5.FAMILY,
    name="Qwen3.5-MoE",
    architectures={
        "Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe",
        "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
    },
    facts=_facts,
    towers=("Qwen3_5MoeForConditionalGeneration",),
    intermediate="shared_expert_intermediate_size",
)
