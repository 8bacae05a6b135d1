"""GLM-4.7-Flash: DeepSeek-V3's attention and experts, with other sizes.

Reads what DeepSeek-V3 does, with the layers without experts in `mlp_layer_types` (the first where
the field is missing). A layer that predicts several tokens stays unread.
"""

from __future__ import annotations

from engine.model.config.block import Facts
from engine.model.config.families.deepseek_v3 import interleaved, sigmoids
from engine.model.config.family import Family, Sizes
from engine.model.config.fields import Fields
from engine.model.config.latent import Latent, read_latent

KINDS = ("dense", "sparse")


def _dense(fields: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers without experts."""
    found = fields.data.get("mlp_layer_types")
    if found is None:
        return (0,)
    if not isinstance(found, list) or len(found) != layers or any(x not in KINDS for x in found):
        expected = f"a list of {layers} names, each {KINDS[0]} or {KINDS[1]}"
        fields.refuse("mlp_layer_types", str(found)[:60], expected)
    return tuple(i for i, kind in enumerate(found) if kind == KINDS[0])


def _latent(fields: Fields) -> Latent:
    return interleaved(fields, read_latent(fields, query_rank=768, value=256, plain=192))


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    return sigmoids(fields, sizes, _latent(fields), _dense(fields, sizes.layers), 1.8)


FAMILY = Family(
    "GLM-4.7-Flash", {"Glm4MoeLiteForCausalLM": "glm4_moe_lite"}, _facts, latent=_latent
)
