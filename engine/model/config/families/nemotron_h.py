"""Nemotron-H and Nemotron 3: layers of Mamba-2, of attention without rope and of an MLP or experts
without a gate, each by itself. A layer here is one of the first two and what follows of the others.

Reads `layers_block_type`, or `hybrid_override_pattern` (M, *, - and E), whose length
num_hidden_layers must be; `mamba_num_heads`, `mamba_head_dim`, `n_groups`, `ssm_state_size`,
`conv_kernel`, `use_conv_bias`, `attention_bias`, `mlp_bias`, the fields of DeepSeek's experts and
`moe_shared_expert_intermediate_size`. Expects backbone.layers with a norm and a mixer.
"""

from __future__ import annotations

from dataclasses import replace

from engine.model.config.block import Block, Facts
from engine.model.config.families.deepseek_fields import WIDEST, experts, factor, groups
from engine.model.config.families.mamba_fields import Keys, mamba
from engine.model.config.families.nemotron_layers import LIST, MLP, MOE, pairs
from engine.model.config.family import Family, Sizes
from engine.model.config.fields import Fields
from engine.model.config.names import Names
from engine.model.mixture import Experts
from kernels.experts.open import Activation
from kernels.experts.route import Routing

KEYS = Keys("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
KEYS = KEYS._replace(conv_bias="use_conv_bias", biases=("use_bias", "mamba_proj_bias"))
NAMES = Names("backbone.", "embeddings", "norm_f", "mixer.", "mixer.", "mixer.", "mixer.")
NAMES = replace(NAMES, before="norm", after="norm", gate_up=("up_proj",))
NAMES = replace(NAMES, correction="gate.e_score_correction_bias", shared="mixer.shared_experts.")
NAMES = replace(NAMES, expert=("up_proj", "down_proj"))


def _experts(fields: Fields, sizes: Sizes, seconds: list[str]) -> Experts | None:
    if MOE not in seconds:
        return None
    for key, plain in (("moe_latent_size", None), ("mlp_bias", False)):
        if fields.data.get(key) not in (None, plain):
            fields.unsupported(key, fields.data[key], f"{plain or 'null'} beside experts")
    count, kept = groups(fields)
    routing = Routing(True, count, kept, 2, factor(fields, 1.0), corrected=True)
    dense = tuple(layer for layer, kind in enumerate(seconds) if kind == MLP)
    normalise = fields.flag("norm_topk_prob", default=True)
    found, shared = (
        experts(fields, sizes, dense, routing, normalise),
        "moe_shared_expert_intermediate_size",
    )
    assert found is not None
    return replace(found, activation=Activation("relu2"), shared=fields.integer(shared, 1, WIDEST))


def _facts(fields: Fields, sizes: Sizes) -> Facts:
    types, halves, seconds = pairs(fields)
    if (act := fields.text("mamba_hidden_act", default="silu")) != "silu":
        fields.unsupported("mamba_hidden_act", act, "silu")
    return Facts(
        Block(wide_norm=True, activation="relu2"),
        attention_bias=fields.flag("attention_bias", default=False),
        mlp_bias=fields.flag("mlp_bias", default=False),
        layer_ropes=(replace(sizes.rope, kind="none", factor=1.0),) * sizes.layers,
        experts=_experts(fields, sizes, seconds),
        recurrent=mamba(fields, types, None, LIST, keys=KEYS),
        bare=tuple(layer for layer, (_, second) in enumerate(halves) if second < 0),
        names=replace(NAMES, halves=halves),
    )


FAMILY = Family(
    "Nemotron-H",
    {"NemotronHForCausalLM": "nemotron_h"},
    _facts,
    head_dim=128,  # whatever the width and the heads
    activation=("mlp_hidden_act", ("relu2",)),
    eps="layer_norm_epsilon",
    layers=lambda fields: len(pairs(fields)[0]),
)
