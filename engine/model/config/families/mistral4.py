"""Mistral Small 4: DeepSeek's attention, experts chosen by their softmax, and queries that grow
with their position (Llama 4's attention temperature).

Reads what DeepSeek-V3 does, but for the scoring, and of its rope `llama_4_scaling_beta`: a query at
position p is multiplied by 1 + beta * ln(1 + floor(p / original_max_position_embeddings)). A
config.json without a rope means YaRN by 128 to transformers, which is refused. Expects the experts
of a layer in one tensor.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.config.block import Block, Facts
from engine.model.config.families.deepseek_fields import (
    NAMES,
    experts,
    factor,
    first_layers,
    groups,
)
from engine.model.config.families.deepseek_v3 import interleaved
from engine.model.config.family import Family, Sizes
from engine.model.config.fields import Fields
from engine.model.config.latent import Latent, bias, read_latent, rope_fields, score
from engine.model.config.rope_config import MAX_POSITIONS
from kernels.experts.route import Routing


def _latent(fields: Fields) -> Latent:
    sizes = interleaved(fields, read_latent(fields, query_rank=1024, plain=64, rank=256))
    inner = rope_fields(fields)
    if not inner.data:
        fields.unsupported("rope_parameters", None, "a rope: none means YaRN by 128 for Mistral 4")
    beta = inner.number("llama_4_scaling_beta", 0.0, 1e3, default=0.0, closed=True)
    if not beta:
        return sizes
    original = inner.integer("original_max_position_embeddings", 1, MAX_POSITIONS)
    return replace(sizes, stretch=(beta, original))


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    latent, dense = _latent(fields), first_layers(fields, sizes, 0)
    count, kept = groups(fields)
    routing = Routing(groups=count, kept=kept, ranked=2, factor=factor(fields, 1.0))
    normalise = fields.flag("norm_topk_prob", default=True)
    return Facts(
        Block(score=score(fields, latent)),
        attention_bias=bias(fields, latent),
        experts=experts(fields, sizes, dense, routing, normalise, stored="rows"),
        names=NAMES,
    )


FAMILY = Family("Mistral 4", {"Mistral4ForCausalLM": "mistral4"}, _facts, latent=_latent)
