"""Qwen3-Next (80B-A3B): Qwen3.5's layers with a mixture, before Qwen3.5.

Reads what Qwen3.5 does, `decoder_sparse_step`, `mlp_only_layers` and `norm_topk_prob`, which must
be true. Expects linear_attn.in_proj_qkvz and in_proj_ba, whose rows lie key head by key head, and
every expert apart.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.config.block import Facts
from engine.model.config.families import qwen3_5, qwen3_5_moe
from engine.model.config.families.qwen3_moe import plain_layers
from engine.model.config.family import Family, Sizes
from engine.model.config.fields import Fields


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    if not fields.flag("norm_topk_prob", default=True):
        fields.unsupported("norm_topk_prob", False, "true")
    return Facts(
        qwen3_5.BLOCK,
        attention_bias=fields.flag("attention_bias", default=False),
        experts=qwen3_5_moe.experts(fields, dense=plain_layers(fields, sizes.layers)),
        recurrent=qwen3_5.recurrent(fields, sizes, interleaved=True),
    )


FAMILY: Family = replace(
    qwen3_5.FAMILY,
    name="Qwen3-Next",
    architectures={"Qwen3NextForCausalLM": "qwen3_next"},
    facts=_facts,
    towers=(),
)
