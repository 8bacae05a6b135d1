"""Granite 4.0: recurrent layers of Mamba-2, few of attention without rope, an MLP in each with
experts beside it or without, and Granite's four factors. Models without recurrent layers rotate.

Reads `layer_types`, `position_embedding_type`, `shared_intermediate_size` (width of the MLP),
`num_local_experts` (0: none), `num_experts_per_tok` and `intermediate_size` (width of an expert),
Bamba's fields of Mamba-2, Granite's factors, and `attention_bias`. Expects mamba in a recurrent
layer and self_attn in another; block_sparse_moe with experts in one tensor, and shared_mlp.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.config.block import Facts
from engine.model.config.families import granite
from engine.model.config.families.mamba_fields import OLDER, mamba
from engine.model.config.family import RECURRENT, Family, Sizes, layer_types
from engine.model.config.fields import Fields
from engine.model.config.names import Names
from engine.model.mixture import Experts

MOST_EXPERTS = 4096  # of a layer; the largest released has 72
WIDEST = 1 << 20
NAMES = Names(
    mlp="shared_mlp.",
    mixture="block_sparse_moe.",
    router="router.layer",
    gate_ups="input_linear.weight",
    downs="output_linear.weight",
    shared="shared_mlp.",
    gate_up=("input_linear",),
    down="output_linear",
)


def _experts(fields: Fields) -> Experts | None:
    count = fields.integer("num_local_experts", 0, MOST_EXPERTS, default=8)
    if not count:
        return None
    return Experts(
        count,
        fields.integer("num_experts_per_tok", 1, count, default=2),
        fields.integer("intermediate_size", 1, WIDEST),
        normalise=True,
        stored="rows",
        shared=fields.integer("shared_intermediate_size", 1, WIDEST, default=1024),
        shared_gate=False,
    )


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    types = layer_types(fields, sizes.layers, RECURRENT, OLDER) or (RECURRENT,) * sizes.layers
    width = fields.integer("mamba_expand", 1, 64, default=2) * sizes.hidden
    kind = fields.text("position_embedding_type", default="nope")
    if kind not in ("rope", "nope"):
        fields.unsupported("position_embedding_type", kind, "rope or nope")
    still = replace(sizes.rope, kind="none", factor=1.0, attention_factor=1.0)
    return replace(
        granite.FAMILY.facts(fields, sizes),
        mlp_bias=False,
        layer_ropes=() if kind == "rope" else (still,) * sizes.layers,
        experts=_experts(fields),
        recurrent=mamba(fields, types, width),
        names=NAMES,
    )


FAMILY = Family(
    "Granite 4",
    {"GraniteMoeHybridForCausalLM": "granitemoehybrid"},
    _facts,
    intermediate="shared_intermediate_size",
)
