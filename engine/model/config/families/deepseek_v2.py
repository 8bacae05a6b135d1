"""DeepSeek-V2 and V2-Lite: latent attention (engine/model/heads/latent.py), and from some layer on
a mixture of experts beside those that every token takes.

Reads `kv_lora_rank`, `q_lora_rank` (null: queries have no latent), `qk_rope_head_dim`,
`qk_nope_head_dim`, `v_head_dim`; `n_routed_experts`, `num_experts_per_tok`, `n_shared_experts`,
`moe_intermediate_size`, `first_k_dense_replace`, `topk_method` (greedy, or group_limited_greedy
with `n_group` and `topk_group`), `routed_scaling_factor`, `attention_bias`. YaRN's mscale_all_dim
scales attention. Expects kv_a_proj_with_mqa, kv_a_layernorm and kv_b_proj.
"""

from __future__ import annotations

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

GREEDY, LIMITED = "greedy", "group_limited_greedy"


def _latent(fields: Fields) -> Latent:
    return read_latent(fields, query_rank=1536)


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    latent, method = _latent(fields), fields.text("topk_method", default=GREEDY)
    if method not in (GREEDY, LIMITED):
        fields.unsupported("topk_method", method, f"{GREEDY} or {LIMITED}")
    if fields.flag("norm_topk_prob", default=False) or fields.flag("mlp_bias", default=False):
        fields.unsupported("norm_topk_prob or mlp_bias", True, "false")
    count, kept = groups(fields) if method == LIMITED else (1, 1)
    routing = Routing(groups=count, kept=kept, factor=factor(fields, 1.0))
    return Facts(
        Block(score=score(fields, latent)),
        attention_bias=bias(fields, latent),
        experts=experts(fields, sizes, first_layers(fields, sizes, 0), routing, False),
        names=NAMES,
    )


FAMILY = Family("DeepSeek-V2", {"DeepseekV2ForCausalLM": "deepseek_v2"}, _facts, latent=_latent)
