"""Gemma 4 (text): windows in five of six layers, wider heads in those that see everything.

Reads `layer_types` (missing: every sixth layer sees all), `sliding_window`, `global_head_dim` and
`num_global_key_value_heads` (or both in `per_layer_config`), `attention_k_eq_v` (v is k before its
norm), `num_kv_shared_layers` (the last layers read the rows of the newest layer of their type
before them), `use_double_wide_mlp` (of those), `hidden_size_per_layer_input`,
`final_logit_softcapping`, `rope_parameters` by layer type, and of a mixture beside the MLP
`enable_moe_block`, `num_experts`, `top_k_experts` and `moe_intermediate_size`. Heads of v are
normed without a weight, and scores are not scaled. Of a checkpoint with towers it reads
text_config, and the tensors behind model.language_model.
"""

from __future__ import annotations

from engine.model.config import family
from engine.model.config.block import Block, Facts
from engine.model.config.family import FULL, SLIDING, Family, Sizes
from engine.model.config.fields import Fields
from engine.model.config.rope_config import PROPORTIONAL, RopeRules
from engine.model.mixture import Experts
from kernels.experts.open import Activation

WIDEST = 1 << 20


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    if not isinstance(fields.data.get("rope_parameters"), dict):
        fields.refuse("rope_parameters", None, "an object: Gemma 4 has no rope without one")
    if fields.data.get("use_bidirectional_attention") == "all":
        fields.unsupported("use_bidirectional_attention", "all", "vision or null")
    types = family.layer_types(fields, sizes.layers)
    if types is None:
        types = tuple(FULL if layer % 6 == 5 else SLIDING for layer in range(sizes.layers))
    if types[-1] != FULL:
        fields.unsupported("layer_types", types[-1], f"{FULL} for the last layer")
    same = fields.flag("attention_k_eq_v", default=False)
    block = Block(
        qk_norm="head",
        norms="both",
        wide_norm=True,
        activation="gelu_tanh",
        embedding=sizes.hidden**0.5,
        logit_cap=fields.number("final_logit_softcapping", 0.0, 1e6, default=0.0),
        score=1.0,
        unit_values=True,
        keys_as_values=same,
        scalar=True,
        per_layer=fields.integer("hidden_size_per_layer_input", 0, WIDEST, default=256),
        wide_readers=fields.flag("use_double_wide_mlp", default=False),
    )
    size, mixed = family.window(fields) or 512, fields.flag("enable_moe_block", default=False)
    near = family.sliding_rope(fields, sizes, "rope_theta", 1e4)
    return Facts(
        block,
        attention_bias=fields.flag("attention_bias", default=False),
        windows=tuple(0 if kind == FULL else size for kind in types),
        layer_ropes=family.layer_ropes(types, near, sizes.rope),
        experts=_experts(fields) if mixed else None,
        seeing_heads=family.heads_of_type(fields, types, FULL, 512, same),
        row_layers=family.shared_rows(fields, types),
    )


def _experts(fields: Fields) -> Experts:
    count = fields.integer("num_experts", 1, 4096)
    chosen = fields.integer("top_k_experts", 1, count)
    width, gelu = fields.integer("moe_intermediate_size", 1, WIDEST), Activation("gelu_tanh")
    return Experts(count, chosen, width, True, activation=gelu, stored="rows", beside=True)


FAMILY = Family(
    "Gemma 4",
    {"Gemma4ForConditionalGeneration": "gemma4", "Gemma4ForCausalLM": "gemma4_text"},
    _facts,
    tied=True,
    head_dim=256,
    activation=("hidden_activation", ("gelu_pytorch_tanh",)),
    rope=RopeRules(theta=1e6, kinds=(PROPORTIONAL,), nested=FULL),
    towers=("Gemma4ForConditionalGeneration",),
)
