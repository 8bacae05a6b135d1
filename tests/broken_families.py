"""Malformed folders of the families beside Llama: fields that contradict each other, tensors that a
family needs and that are missing. As in tests/broken_models.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from tests.broken_models import Broken, Build, Weights, _config, _weights
from tests.tiny_model import CONFIG, SINGLE, joined, packed, sound

QWEN2 = dict(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
QWEN3 = dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=8)
MISTRAL = dict(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=None)
SMOLLM3 = dict(architectures=["SmolLM3ForCausalLM"], model_type="smollm3")
PHI3 = dict(architectures=["Phi3ForCausalLM"], model_type="phi3")
GRANITE = dict(architectures=["GraniteForCausalLM"], model_type="granite")
OLMO2 = dict(architectures=["Olmo2ForCausalLM"], model_type="olmo2")
MOE: dict = dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    head_dim=8,
    num_experts=3,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
)
MINIMAX: dict = dict(
    architectures=["MiniMaxM2ForCausalLM"],
    model_type="minimax_m2",
    num_local_experts=3,
    num_experts_per_tok=2,
)
GEMMA2 = dict(architectures=["Gemma2ForCausalLM"], model_type="gemma2", hidden_act=...)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=64, truncate=False)
OSS: dict = dict(
    architectures=["GptOssForCausalLM"],
    model_type="gpt_oss",
    head_dim=8,
    intermediate_size=32,
    attention_bias=False,
    rope_scaling=YARN,
    num_local_experts=3,
    num_experts_per_tok=2,
)
MXFP4 = dict(quantization_config={"quant_method": "mxfp4"})
MLP = "model.layers.0.mlp."
FOUR = [1.0, 1.0, 2.0, 4.0]
SLIDES = ["sliding_attention"]


def _longrope(**changes: object) -> Build:
    rope = dict(rope_type="longrope", short_factor=FOUR, long_factor=FOUR) | changes
    return _config(**PHI3, rope_scaling=rope, original_max_position_embeddings=64)


def _extra_norm(weights: Weights) -> Weights:
    return weights | {"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}


def _row(name: str, build: Build, *words: str) -> Broken:
    return Broken(name, build, 1, words)


def _experts(change: Callable[[Weights], Weights]) -> Build:
    """A mixture of three experts of 8, whose tensors `change` spoils."""

    def build(folder: Path) -> None:
        weights = {k: v for k, v in sound(folder).items() if ".mlp." not in k}
        for name in ("q_norm", "k_norm"):
            weights[f"model.layers.0.self_attn.{name}.weight"] = torch.ones(8)
        weights[MLP + "gate.weight"] = torch.zeros(3, 32)
        for number in range(3):
            for name, shape in (("gate", (8, 32)), ("up", (8, 32)), ("down", (32, 8))):
                weights[f"{MLP}experts.{number}.{name}_proj.weight"] = torch.zeros(shape)
        (folder / "config.json").write_text(json.dumps({**CONFIG, **MOE}))
        (folder / SINGLE).write_bytes(joined(*packed(change(weights))))

    return build


def _gpt_oss(change: Callable[[Weights], Weights], **config: object) -> Build:
    """gpt-oss with three experts of 32 in MXFP4, whose tensors `change` spoils."""

    def build(folder: Path) -> None:
        weights = {k: v for k, v in sound(folder).items() if ".mlp." not in k}
        weights["model.layers.0.self_attn.sinks"] = torch.zeros(4)
        weights[MLP + "router.weight"] = torch.zeros(3, 32)
        weights[MLP + "router.bias"] = torch.zeros(3)
        for name, rows in (("gate_up_proj", 64), ("down_proj", 32)):
            at = f"{MLP}experts.{name}"
            weights[f"{at}_bias"] = torch.zeros(3, rows)
            weights[f"{at}_blocks"] = torch.zeros(3, rows, 1, 16, dtype=torch.uint8)
            weights[f"{at}_scales"] = torch.full((3, rows, 1), 127, dtype=torch.uint8)
        held = {**CONFIG, **OSS, **MXFP4, **config}
        (folder / "config.json").write_text(json.dumps(held))
        (folder / SINGLE).write_bytes(joined(*packed(change(weights))))

    return build


def _bytes(part: str, *shape: int, value: int = 127) -> Callable[[Weights], Weights]:
    made = torch.full(shape, value, dtype=torch.uint8)
    return lambda weights: weights | {MLP + part: made}


def _left_out(part: str) -> Callable[[Weights], Weights]:
    return lambda weights: {k: v for k, v in weights.items() if MLP + part not in k}


def _grown(part: str, shape: tuple[int, int]) -> Callable[[Weights], Weights]:
    return lambda weights: weights | {MLP + part: torch.zeros(shape)}


BROKEN_FAMILIES: list[Broken] = [
    _row(
        "unknown-near",
        _config(architectures=["Qwen2MoeForCausalLM"]),
        "found Qwen2MoeForCausalLM",
        "the nearest is Qwen3MoeForCausalLM",
        "one of LlamaForCausalLM",
    ),
    _row(
        "unknown-model-type",
        _config(architectures=..., model_type="mamba"),
        "model_type mamba",
        "one of LlamaForCausalLM",
        "the nearest is BambaForCausalLM",
    ),
    _row("architectures-number", _config(architectures=[3]), "architectures", "a list with one"),
    # tensors that a family needs
    _row("qwen2-no-bias", _config(**QWEN2), "self_attn.q_proj.bias: found nothing", "shape [32]"),
    _row("qwen3-no-norm", _config(**QWEN3), "self_attn.q_norm.weight: found nothing", "shape [8]"),
    _row(
        "qwen3-usual-head",
        _config(**{**QWEN3, "head_dim": None}),
        "q_norm.weight: found nothing",
        "shape [128]",
    ),
    _row(
        "phi3-not-fused",
        _config(**PHI3),
        "self_attn.qkv_proj.weight: found nothing",
        "the first unknown tensor is",
    ),
    _row(
        "olmo2-no-norms", _config(**OLMO2), "q_norm.weight: found nothing", "shape [32] (3 missing)"
    ),
    _row("llama-with-norm", _weights(_extra_norm), "q_norm.weight", "describes no such tensor"),
    # sliding windows
    _row(
        "types-count",
        _config(**QWEN2, layer_types=SLIDES * 2),
        "layer_types",
        "a list of 1 names",
    ),
    _row("types-text", _config(**QWEN2, layer_types="full"), "layer_types: found full", "a list"),
    _row(
        "types-unknown",
        _config(**QWEN2, layer_types=["linear_attention"]),
        "layer_types: found linear_attention",
        "full_attention or sliding_attention",
    ),
    _row(
        "types-no-window",
        _config(**QWEN2, layer_types=SLIDES, sliding_window=64),
        "sliding_window: found nothing",
        "layer_types has sliding_attention",
    ),
    _row(
        "window-text",
        _config(**{**MISTRAL, "sliding_window": "4096"}),
        "sliding_window: found 4096, expected an integer",
    ),
    _row("window-zero", _config(**{**MISTRAL, "sliding_window": 0}), "sliding_window: found 0"),
    _row(
        "window-missing",
        _config(**{**MISTRAL, "sliding_window": ...}),
        "sliding_window",
        "4096 for Mistral",
    ),
    _row(
        "window-flag",
        _config(**QWEN2, use_sliding_window=1),
        "use_sliding_window: found 1",
        "true or false",
    ),
    _row(
        "window-first-layer",
        _config(**QWEN2, use_sliding_window=True, sliding_window=64, max_window_layers=-1),
        "max_window_layers: found -1",
    ),
    # layers without rope
    _row("nope-text", _config(**SMOLLM3, no_rope_layers="none"), "no_rope_layers: found none"),
    _row(
        "nope-short", _config(**SMOLLM3, no_rope_layers=[]), "no_rope_layers: found []", "1 times"
    ),
    _row("nope-two", _config(**SMOLLM3, no_rope_layers=[2]), "no_rope_layers: found 2", "0 (no"),
    _row("nope-flag", _config(**SMOLLM3, no_rope_layers=[True]), "no_rope_layers: found"),
    _row(
        "nope-interval",
        _config(**SMOLLM3, no_rope_layer_interval=0),
        "no_rope_layer_interval: found 0",
    ),
    # longrope and partial rotation
    _row("longrope-nothing", _longrope(short_factor=None), "short_factor: found nothing", "4 num"),
    _row(
        "longrope-count",
        _longrope(long_factor=FOUR[:3]),
        "rope_scaling.long_factor: found a list of 3",
        "a list of 4 numbers",
    ),
    _row("longrope-zero", _longrope(short_factor=[1, 1, 0, 1]), "short_factor: found 0", "above 0"),
    _row("longrope-text", _longrope(long_factor=["1"] * 4), "long_factor: found 1", "numbers"),
    _row("longrope-nan", _longrope(long_factor=[float("nan")] * 4), "long_factor: found nan"),
    _row("longrope-attention", _longrope(attention_factor=0), "attention_factor: found 0"),
    _row("partial-none", _config(**PHI3, partial_rotary_factor=0.0), "partial_rotary_factor"),
    _row(
        "partial-odd",
        _config(**PHI3, partial_rotary_factor=0.4),
        "partial_rotary_factor: found 0.4",
        "head_dim = 8",
    ),
    _row(
        "partial-more", _config(**PHI3, partial_rotary_factor=1.5), "partial_rotary_factor: found"
    ),
    # factors
    _row(
        "granite-embedding",
        _config(**GRANITE, embedding_multiplier=0),
        "embedding_multiplier: found 0",
    ),
    _row("granite-logits", _config(**GRANITE, logits_scaling=0), "logits_scaling: found 0"),
    _row(
        "granite-attention",
        _config(**GRANITE, attention_multiplier="auto"),
        "attention_multiplier: found auto",
    ),
    _row(
        "granite-residual",
        _config(**GRANITE, residual_multiplier=float("inf")),
        "residual_multiplier: found inf",
    ),
    _row(
        "dual-chunk-text",
        _config(**QWEN2, dual_chunk_attention_config="yes"),
        "dual_chunk_attention_config: found yes",
    ),
    _row(
        "dual-chunk-size",
        _config(**QWEN2, dual_chunk_attention_config={"local_size": 8}),
        "dual_chunk_attention_config.chunk_size: found nothing",
    ),
    # mixtures of experts
    _row("moe-no-router", _experts(_left_out("gate.weight")), "mlp.gate.weight: found nothing"),
    _row(
        "moe-experts-missing",
        _experts(_left_out("experts.2.")),
        "experts.2.gate_proj.weight: found nothing",
        "(3 missing)",
    ),
    _row(
        "moe-one-down-missing",
        _experts(_left_out("experts.1.down_proj.weight")),
        "experts.1.down_proj.weight: found nothing",
    ),
    _row(
        "moe-too-many",
        _experts(_grown("experts.3.up_proj.weight", (8, 32))),
        "experts.3.up_proj.weight",
        "describes no such tensor",
    ),
    _row(
        "moe-router-shape",
        _experts(_grown("gate.weight", (4, 32))),
        "mlp.gate.weight: found shape [4, 32]",
        "expected [3, 32] as config.json says",
    ),
    _row(
        "moe-expert-shape",
        _experts(_grown("experts.0.down_proj.weight", (32, 9))),
        "experts.0.down_proj.weight: found shape [32, 9]",
    ),
    _row(
        "moe-plain-mlp",
        _config(**MOE),
        "found nothing",
        "the first unknown tensor is model.layers.0.mlp.gate_proj.weight",
    ),
    _row("moe-no-count", _config(**MOE | {"num_experts": ...}), "num_local_experts"),
    _row("moe-count-zero", _config(**MOE | {"num_experts": 0}), "num_experts: found 0"),
    _row(
        "moe-count-huge",
        _config(**MOE | {"num_experts": 10**9}),
        "num_experts: found 1000000000",
    ),
    _row(
        "moe-chosen-beyond",
        _config(**MOE | {"num_experts_per_tok": 4}),
        "num_experts_per_tok: found 4",
        "from 1 to 3",
    ),
    _row(
        "moe-no-width",
        _config(**MOE | {"moe_intermediate_size": ...}),
        "moe_intermediate_size: found nothing",
    ),
    _row(
        "moe-normalise-text",
        _config(**MOE, norm_topk_prob="yes"),
        "norm_topk_prob: found yes",
    ),
    _row("moe-step-zero", _config(**MOE, decoder_sparse_step=0), "decoder_sparse_step: found 0"),
    _row(
        "moe-only-layers",
        _config(**MOE, mlp_only_layers=[7]),
        "mlp_only_layers: found",
        "layer numbers below 1",
    ),
    _row("minimax-scores", _config(**MINIMAX, scoring_func="softmax"), "scoring_func: found soft"),
    _row(
        "minimax-linear",
        _config(**MINIMAX, attn_type_list=[0]),
        "attn_type_list: found",
        "for each",
    ),
    _row("minimax-shared", _config(**MINIMAX, shared_intermediate_size=9), "found 9, expected 0"),
    _row("minimax-no-norm", _config(**MINIMAX, use_qk_norm=False), "use_qk_norm: found False"),
    _row("minimax-odd-rope", _config(**MINIMAX, rotary_dim=3), "an even number"),
    _row("minimax-wide-rope", _config(**MINIMAX, rotary_dim=1 << 20), "rotary_dim: found 1048576"),
    _row("minimax-no-count", _config(**MINIMAX | {"num_local_experts": ...}), "num_local_experts"),
    # a cap on attention scores, sinks, experts in MXFP4
    _row(
        "cap-negative",
        _config(**GEMMA2, attn_logit_softcapping=-1.0),
        "attn_logit_softcapping: found -1.0",
        "above 0",
    ),
    _row(
        "cap-nan",
        _config(**GEMMA2, attn_logit_softcapping=float("nan")),
        "attn_logit_softcapping: found nan",
    ),
    _row(
        "cap-infinite",
        _config(**GEMMA2, attn_logit_softcapping=float("inf")),
        "attn_logit_softcapping: found inf",
    ),
    _row(
        "cap-text",
        _config(**GEMMA2, attn_logit_softcapping="50"),
        "attn_logit_softcapping: found 50",
        "expected a number",
    ),
    _row(
        "final-cap-zero",
        _config(**GEMMA2, final_logit_softcapping=0),
        "final_logit_softcapping: found 0",
    ),
    _row("oss-no-rope", _config(**OSS | {"rope_scaling": ...}), "rope_scaling: found nothing"),
    _row("oss-limit", _config(**OSS, swiglu_limit=-7.0), "swiglu_limit: found -7.0"),
    _row("oss-alpha", _config(**OSS, swiglu_alpha=float("nan")), "swiglu_alpha: found nan"),
    _row("oss-count", _config(**OSS | {"num_local_experts": 0}), "num_local_experts: found 0"),
    _row("oss-chosen", _config(**OSS | {"num_experts_per_tok": 4}), "num_experts_per_tok: found 4"),
    _row("oss-other-bits", _config(**OSS, quantization_config={"quant_method": "nf5"}), "nf5"),
    _row("llama-in-mxfp4", _config(**MXFP4), "not supported yet: mxfp4"),
    _row(
        "oss-mxfp4-columns",
        _config(**OSS | MXFP4 | {"intermediate_size": 48}),
        "intermediate_size: found 48",
        "a multiple of 32",
    ),
    _row(
        "oss-sinks-missing",
        _gpt_oss(lambda w: {k: v for k, v in w.items() if not k.endswith("sinks")}),
        "self_attn.sinks: found nothing",
        "shape [4]",
    ),
    _row(
        "oss-sinks-shape",
        _gpt_oss(lambda w: w | {"model.layers.0.self_attn.sinks": torch.zeros(5)}),
        "self_attn.sinks: found shape [5]",
        "expected [4]",
    ),
    _row(
        "oss-sinks-nan",
        _gpt_oss(lambda w: w | {"model.layers.0.self_attn.sinks": torch.full((4,), torch.nan)}),
        "self_attn.sinks",
        "NaN",
    ),
    _row("oss-no-router-bias", _gpt_oss(_left_out("router.bias")), "router.bias: found nothing"),
    _row(
        "oss-no-blocks",
        _gpt_oss(_left_out("experts.down_proj_blocks")),
        "experts.down_proj_blocks: found nothing",
        "shape [3, 32, 1, 16]",
    ),
    _row(
        "oss-experts-missing",
        _gpt_oss(_bytes("experts.gate_up_proj_blocks", 2, 64, 1, 16)),
        "experts.gate_up_proj_blocks: found shape [2, 64, 1, 16]",
        "expected [3, 64, 1, 16]",
    ),
    _row(
        "oss-scales-disagree",
        _gpt_oss(_bytes("experts.down_proj_scales", 3, 32, 2)),
        "experts.down_proj_scales: found shape [3, 32, 2]",
        "expected [3, 32, 1]",
    ),
    _row(
        "oss-half-a-block",
        _gpt_oss(_bytes("experts.down_proj_blocks", 3, 32, 1, 8)),
        "experts.down_proj_blocks: found shape [3, 32, 1, 8]",
    ),
    _row(
        "oss-scale-nan",
        _gpt_oss(_bytes("experts.down_proj_scales", 3, 32, 1, value=255)),
        "experts.down_proj_scales",
        "a scale that is NaN",
    ),
    _row(
        "oss-blocks-float",
        _gpt_oss(lambda w: w | {MLP + "experts.down_proj_blocks": torch.zeros(3, 32, 1, 16)}),
        "experts.down_proj_blocks: found dtype F32",
        "expected U8",
    ),
    _row(
        "oss-floats-named-mxfp4",
        _gpt_oss(
            lambda w: (
                {k: v for k, v in w.items() if "_blocks" not in k and "_scales" not in k}
                | {MLP + "experts.down_proj": torch.zeros(3, 32, 32)}
            )
        ),
        "experts.gate_up_proj_blocks: found nothing",
        "the first unknown tensor is model.layers.0.mlp.experts.down_proj",
    ),
    _row("qwen3-activation", _config(**QWEN3, hidden_act="gelu"), "hidden_act: found gelu"),
]
