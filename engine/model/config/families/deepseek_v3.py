"""DeepSeek-V3 and R1: DeepSeek-V2's attention, and experts whose scores are sigmoids.

Reads what DeepSeek-V2 does, with `topk_method` and `scoring_func` that say
noaux_tc and sigmoid; `norm_topk_prob`, and `rope_interleave`. Expects a correction of the choice
(mlp.gate.e_score_correction_bias) in every mixture. Layers that predict several tokens stay unread.
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
from engine.model.config.family import Family, Sizes
from engine.model.config.fields import Fields
from engine.model.config.latent import Latent, bias, read_latent, score
from kernels.experts.route import Routing


def interleaved(fields: Fields, sizes: Latent) -> Latent:
    """Return the sizes with what rope_interleave says of the stored pairs."""
    return replace(sizes, pairs=fields.flag("rope_interleave", default=True))


def sigmoids(
    fields: Fields, sizes: Sizes, latent: Latent, dense: tuple[int, ...], usual: float
) -> Facts:
    """Return the facts of a model whose experts are scored by sigmoids and corrected, in all layers
    but those in `dense`; usual: factor of the shares where the file names none.
    """
    for key, expected in (("topk_method", "noaux_tc"), ("scoring_func", "sigmoid")):
        found = fields.text(key, default=expected)
        if found != expected:
            fields.unsupported(key, found, expected)
    count, kept = groups(fields)
    routing = Routing(True, count, kept, 2, factor(fields, usual), corrected=True)
    normalise = fields.flag("norm_topk_prob", default=True)
    return Facts(
        Block(score=score(fields, latent)),
        attention_bias=bias(fields, latent),
        experts=experts(fields, sizes, dense, routing, normalise),
        names=NAMES,
    )


def _latent(fields: Fields) -> Latent:
    return interleaved(fields, read_latent(fields, query_rank=1536))


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    return sigmoids(fields, sizes, _latent(fields), first_layers(fields, sizes, 3), 2.5)


FAMILY = Family("DeepSeek-V3", {"DeepseekV3ForCausalLM": "deepseek_v3"}, _facts, latent=_latent)
