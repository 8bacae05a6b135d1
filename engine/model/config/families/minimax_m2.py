"""MiniMax-M2 (230B-A10B): grouped attention in every layer, of whose heads a half rotates, q and k
normed over all heads at once, and a mixture whose router has sigmoids.

Reads `rotary_dim` (or `partial_rotary_factor`), `num_local_experts`, `num_experts_per_tok` and
`intermediate_size` (width of an expert), and refuses what no released file has: `scoring_func` but
sigmoid, `use_qk_norm` or `use_routing_bias` of false, `shared_intermediate_size`, and layers of
linear attention in `attn_type_list`. Expects block_sparse_moe.gate, its e_score_correction_bias,
which chooses and is in no share, and every expert's w1, w2 and w3.
"""

from __future__ import annotations

from engine.model.config.block import Block, Facts
from engine.model.config.family import Family, Sizes
from engine.model.config.fields import Fields
from engine.model.config.names import Names
from engine.model.config.rope_config import RopeRules
from engine.model.mixture import Experts

MOST = 4096  # experts of a layer; the largest released has 256
WIDEST = 1 << 20
NAMES = Names(mixture="block_sparse_moe.", expert=("w1", "w3", "w2"))


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    scores = fields.text("scoring_func", default="sigmoid")
    if scores != "sigmoid":
        fields.unsupported("scoring_func", scores, "sigmoid")
    for key in ("use_qk_norm", "use_routing_bias"):
        if not fields.flag(key, default=True):
            fields.unsupported(key, False, "true")
    shared = fields.integer("shared_intermediate_size", 0, WIDEST, default=0)
    if shared:
        fields.unsupported("shared_intermediate_size", shared, "0")
    kinds = fields.data.get("attn_type_list")
    if kinds is not None and kinds != [1] * sizes.layers:
        fields.unsupported("attn_type_list", kinds, f"1 (attention) for each of {sizes.layers}")
    count = fields.integer("num_local_experts", 1, MOST)
    experts = Experts(
        count,
        fields.integer("num_experts_per_tok", 1, count),
        fields.integer("intermediate_size", 1, WIDEST),
        normalise=True,
        sigmoid=True,
    )
    return Facts(Block(qk_norm="width"), experts=experts, names=NAMES)


FAMILY = Family(
    "MiniMax-M2",
    {"MiniMaxM2ForCausalLM": "minimax_m2"},
    _facts,
    rope=RopeRules(theta=5e6, partial=True, dims="rotary_dim"),
)
