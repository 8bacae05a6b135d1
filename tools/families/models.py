"""A small random model of every family, made by transformers: folder, and transformers' own model.

Weights are scaled so that attention is peaky, and norms differ from one, so that a norm, a bias or
a factor that is forgotten shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

VOCAB = 199
POSITIONS = 2048
SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=POSITIONS,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
PHI_ROPE = dict(
    rope_type="longrope",
    rope_theta=10000.0,
    short_factor=[1.0, 1.1, 1.3, 1.6, 2.0, 2.5],
    long_factor=[1.0, 1.5, 2.5, 4.0, 7.0, 12.0],
    partial_rotary_factor=0.75,
)
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
HYBRID = dict(
    head_dim=16,
    num_hidden_layers=8,
    layer_types=([LINEAR] * 3 + [FULL]) * 2,
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
)
GEMMA = dict(
    head_dim=16,
    query_pre_attn_scalar=24,
    num_hidden_layers=6,  # three layers that see everything are the fewest to calibrate
    layer_types=[FULL, SLIDING] * 3,
    tie_word_embeddings=True,
    final_logit_softcapping=20.0,
)
GEMMA4 = dict(
    head_dim=16,
    global_head_dim=24,
    num_hidden_layers=6,
    layer_types=[SLIDING, FULL] * 3,
    sliding_window=90,
    hidden_size_per_layer_input=0,
    tie_word_embeddings=True,
    final_logit_softcapping=20.0,
    rope_parameters={
        FULL: dict(rope_type="proportional", partial_rotary_factor=0.5, rope_theta=1e6),
        SLIDING: dict(rope_type="default", rope_theta=1e4),
    },
)
GRANITE = dict(
    embedding_multiplier=12.0,
    residual_multiplier=0.22,
    attention_multiplier=0.0625,
    logits_scaling=8.0,
)
MIXED = dict(
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    shared_expert_intermediate_size=40,
)
NEMOTRON = dict(
    mamba_num_heads=6,
    mamba_head_dim=16,
    ssm_state_size=24,
    head_dim=16,
    layer_norm_epsilon=1e-5,
)
FALCON = dict(
    mamba_d_ssm=64,
    mamba_n_heads=4,
    mamba_d_head=16,
    mamba_d_state=24,
    mamba_n_groups=2,
    head_dim=16,
    attention_in_multiplier=0.9,
    key_multiplier=0.4,
    attention_out_multiplier=0.7,
    ssm_in_multiplier=1.3,
    ssm_multipliers=[0.8, 0.6, 1.5, 0.7, 1.2],
    ssm_out_multiplier=0.6,
    mlp_multipliers=[0.75, 0.5],
    embedding_multiplier=3.0,
    lm_head_multiplier=0.25,
)
MAMBA = dict(mamba_n_heads=6, mamba_d_head=16, mamba_d_state=24, mamba_n_groups=2)
LATENT = dict(
    num_key_value_heads=4,
    kv_lora_rank=24,
    q_lora_rank=20,
    qk_rope_head_dim=8,
    qk_nope_head_dim=12,
    v_head_dim=16,
)
LATENT_YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=512
)
ROUTED = dict(
    n_routed_experts=8,
    num_experts_per_tok=3,
    n_shared_experts=2,
    moe_intermediate_size=24,
    first_k_dense_replace=1,
    routed_scaling_factor=1.7,
)
# name: (transformers' configuration, changes to it)
VARIANTS: dict[str, tuple[str, dict]] = {
    "llama": ("Llama", dict(head_dim=16)),
    "qwen2": ("Qwen2", dict(max_window_layers=2)),
    "qwen2-tied": ("Qwen2", dict(tie_word_embeddings=True, num_key_value_heads=1)),
    "qwen2-yarn": (
        "Qwen2",
        dict(
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=1e6,
                factor=4.0,
                original_max_position_embeddings=512,
            )
        ),
    ),
    "qwen3": ("Qwen3", dict(head_dim=16)),
    "qwen3-bias": ("Qwen3", dict(head_dim=20, attention_bias=True, tie_word_embeddings=True)),
    "qwen3.5": ("Qwen3_5Text", HYBRID),
    "qwen3.5-tied": (
        "Qwen3_5Text",
        {
            **HYBRID,
            "num_hidden_layers": 6,
            "layer_types": [LINEAR, FULL] * 3,
            "linear_num_value_heads": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3.5-moe": ("Qwen3_5MoeText", {**HYBRID, **MIXED}),
    "qwen3-next": (
        "Qwen3Next",
        {**HYBRID, **MIXED, "mlp_only_layers": [1], "decoder_sparse_step": 1},
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        dict(
            head_dim=16,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=True,
        ),
    ),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        dict(
            num_experts=5,
            num_experts_per_tok=3,
            moe_intermediate_size=16,
            decoder_sparse_step=2,
            mlp_only_layers=[1],
        ),
    ),
    "mistral": ("Mistral", dict(sliding_window=None, head_dim=16)),
    "smollm3": ("SmolLM3", dict(tie_word_embeddings=True)),
    "smollm3-list": ("SmolLM3", dict(no_rope_layers=[0, 1, 1, 0], attention_bias=True)),
    "phi3": ("Phi3", dict(head_dim=16)),
    "phi3-longrope": (
        "Phi3",
        dict(hidden_size=64, rope_parameters=PHI_ROPE, original_max_position_embeddings=512),
    ),
    "granite": ("Granite", GRANITE),
    "granite-bias": ("Granite", dict(**GRANITE, attention_bias=True, mlp_bias=True)),
    "granite-hybrid": (
        "GraniteMoeHybrid",
        dict(
            **GRANITE,
            **MAMBA,
            num_hidden_layers=8,
            layer_types=([LINEAR] * 3 + [FULL]) * 2,
            num_local_experts=5,
            num_experts_per_tok=2,
            shared_intermediate_size=40,
        ),
    ),
    "granite-hybrid-dense": (
        "GraniteMoeHybrid",
        dict(
            **{**GRANITE, **MAMBA, "mamba_n_groups": 1, "mamba_conv_bias": False},
            num_hidden_layers=6,
            layer_types=[LINEAR, FULL] * 3,
            num_local_experts=0,
            shared_intermediate_size=72,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "granite-hybrid-attention": (
        "GraniteMoeHybrid",
        dict(
            **GRANITE,
            **MAMBA,  # read by transformers, and of no layer
            layer_types=[FULL] * 4,
            num_local_experts=0,
            shared_intermediate_size=72,
            position_embedding_type="rope",
        ),
    ),
    "bamba": (
        "Bamba",
        dict(**MAMBA, num_hidden_layers=6, attn_layer_indices=[1, 3, 5], head_dim=16),
    ),
    "falcon-h1": ("FalconH1", dict(**FALCON, mamba_rms_norm=False)),
    "falcon-h1-norm": (
        "FalconH1",
        dict(
            **{**FALCON, "attention_in_multiplier": 1.0, "attention_out_multiplier": 1.0},
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            attention_bias=True,
        ),
    ),
    "falcon-h1-after": ("FalconH1", dict(**FALCON, mamba_rms_norm=True, mlp_bias=True)),
    "nemotron-h": (
        "NemotronH",
        dict(
            **NEMOTRON,
            layers_block_type=[LINEAR, "mlp", LINEAR, LINEAR, "mlp", FULL, "mlp"] * 2 + [FULL],
            n_groups=2,
            tie_word_embeddings=False,
        ),
    ),
    "nemotron-h-bias": (
        "NemotronH",
        dict(
            **NEMOTRON,
            layers_block_type=[LINEAR, FULL, "mlp"] * 3,
            n_groups=1,
            mlp_bias=True,
            use_conv_bias=False,
        ),
    ),
    "nemotron-h-moe": (
        "NemotronH",
        dict(
            **NEMOTRON,
            layers_block_type=[LINEAR, "moe", LINEAR, LINEAR, "mlp", FULL, "moe"] * 2 + [FULL],
            n_groups=2,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=40,
            routed_scaling_factor=2.5,
        ),
    ),
    "mistral-window": ("Mistral", dict(sliding_window=50)),
    "ministral": (
        "Ministral",
        dict(
            head_dim=16,
            sliding_window=100,
            num_hidden_layers=6,
            layer_types=[FULL, SLIDING] * 3,
        ),
    ),
    "qwen2-window": (
        "Qwen2",
        dict(
            use_sliding_window=True,
            sliding_window=70,
            num_hidden_layers=6,
            max_window_layers=3,
        ),
    ),
    "phi3-window": ("Phi3", dict(sliding_window=300)),
    "gemma3": (
        "Gemma3Text",
        dict(
            **GEMMA,
            sliding_window=90,
            rope_parameters={
                FULL: dict(rope_type="linear", factor=8.0, rope_theta=1e6),
                SLIDING: dict(rope_type="default", rope_theta=1e4),
            },
        ),
    ),
    "gemma2": ("Gemma2", dict(**GEMMA, sliding_window=128, attn_logit_softcapping=None)),
    "gemma2-cap": ("Gemma2", dict(**GEMMA, sliding_window=128, attn_logit_softcapping=3.0)),
    "gemma3n": (
        "Gemma3nText",
        {
            **{key: GEMMA4[key] for key in ("head_dim", "sliding_window", "tie_word_embeddings")},
            "num_hidden_layers": 10,
            "layer_types": [SLIDING, FULL] * 5,
            "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCAB - 9,
            "altup_num_inputs": 3,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.7] * 3 + [0.0] * 7,
            "final_logit_softcapping": 20.0,
            "rope_parameters": {
                FULL: dict(rope_type="default", rope_theta=1e6),
                SLIDING: dict(rope_type="default", rope_theta=1e4),
            },
        },
    ),
    "gemma4": ("Gemma4Text", {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-shared": (
        "Gemma4Text",
        {
            **GEMMA4,
            "num_hidden_layers": 10,
            "layer_types": [SLIDING, FULL] * 5,
            "num_kv_shared_layers": 5,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCAB,
            "num_key_value_heads": 1,
        },
    ),
    "gemma4-moe": (
        "Gemma4Text",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 4,
        },
    ),
    "gpt-oss": (
        "GptOss",
        dict(
            head_dim=16,
            num_hidden_layers=6,
            layer_types=[SLIDING, FULL] * 3,
            sliding_window=60,
            num_local_experts=5,
            num_experts_per_tok=2,
            swiglu_limit=0.7,  # small enough to act
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=150000.0,
                factor=4.0,
                original_max_position_embeddings=512,
                truncate=False,
            ),
        ),
    ),
    "minimax-m2": (
        "MiniMaxM2",
        dict(
            head_dim=16,
            intermediate_size=24,
            num_local_experts=7,
            num_experts_per_tok=3,
            rope_parameters=dict(rope_type="default", rope_theta=5e6, partial_rotary_factor=0.5),
        ),
    ),
    "deepseek-v2-lite": ("DeepseekV2", {**LATENT, **ROUTED, "q_lora_rank": None}),
    "deepseek-v2": (
        "DeepseekV2",
        {
            **LATENT,
            **ROUTED,
            "attention_bias": True,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {**LATENT_YARN, "mscale": 0.707, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {**LATENT, **ROUTED, "n_group": 4, "topk_group": 2, "norm_topk_prob": True},
    ),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        {
            **LATENT,
            **ROUTED,
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {**LATENT_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "glm4-moe-lite": (
        "Glm4MoeLite",
        {**LATENT, **ROUTED, "mlp_layer_types": ["dense", "sparse", "sparse", "dense"]},
    ),
    "minicpm3": (
        "MiniCPM3",
        {
            **LATENT,
            "v_head_dim": None,
            "tie_word_embeddings": True,
            "scale_emb": 3.0,
            "dim_model_base": 32,
        },
    ),
    "minicpm3-longrope": (
        "MiniCPM3",
        {
            **LATENT,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": dict(
                rope_type="longrope",
                rope_theta=1e4,
                short_factor=[1.0, 1.1, 1.3, 1.6],
                long_factor=[1.0, 1.5, 2.5, 4.0],
                original_max_position_embeddings=512,
            ),
        },
    ),
    "mistral4": (
        "Mistral4",
        {
            **LATENT,
            **ROUTED,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {
                **LATENT_YARN,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo2-bias": ("Olmo2", dict(attention_bias=True, num_key_value_heads=4)),
    "olmo3": (
        "Olmo3",
        dict(
            num_hidden_layers=6,
            layer_types=[SLIDING, FULL] * 3,
            sliding_window=60,
            rope_parameters={
                SLIDING: dict(rope_type="default", rope_theta=5e5),
                FULL: dict(
                    rope_type="yarn",
                    rope_theta=5e5,
                    factor=4.0,
                    original_max_position_embeddings=512,
                ),
            },
        ),
    ),
}


def configuration(name: str, **more: Any) -> Any:
    """Transformers' configuration of a variant. more: changes beside the variant's."""
    import transformers

    kind, changes = VARIANTS[name]
    maker = getattr(transformers, f"{kind}Config")
    return maker(**{**SMALL, **json.loads(json.dumps(changes)), **more})


def make(folder: Path, name: str, **more: Any) -> Any:
    """Write a model folder and return transformers' model of it, in float32.

    more: changes to the configuration beside the variant's.
    """
    import transformers

    kind, config = VARIANTS[name][0], configuration(name, **more)
    torch.manual_seed(sum(map(ord, name)))
    maker = transformers.AutoModelForCausalLM.from_config
    if kind == "Mistral4":  # which the list of automatic ones lacks
        maker = transformers.Mistral4ForCausalLM._from_config
    theirs = maker(config, attn_implementation="eager")
    theirs = theirs.float().eval()
    with torch.no_grad():
        for key, buffer in theirs.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)  # as far apart as sigmoids are
            elif key.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        for key, weight in theirs.named_parameters():
            if kind.startswith(("Gemma4", "Gemma3n")) and key.endswith(
                ("q_norm.weight", "k_norm.weight")
            ):
                weight.normal_(0.6, 0.1)  # scores have no other scale
            elif "norm" in key:
                plain = (
                    kind.startswith(("Gemma4", "Gemma3n"))
                    or not kind.startswith(("Gemma", "Qwen3_5", "Qwen3Next"))
                    or "linear_attn" in key
                )
                weight.normal_(1.0 if plain else 0.0, 0.2)
            elif key.endswith(("A_log", "dt_bias")):
                weight.uniform_(-3.0, 0.0)  # decays of 3 to 100 tokens
            elif key.endswith(("router.scale", "per_expert_scale")):
                weight.uniform_(0.5, 1.5)
            elif key.endswith("correct_output_scale"):
                weight.normal_(1.0, 0.2)
            elif key.endswith("sinks"):
                weight.normal_(1.0, 2.0)
            elif key.endswith("bias"):
                weight.normal_(0.0, 0.3)
            else:
                peaky = any(part in key for part in ("q_proj", "k_proj", "qkv_proj", "q_b_proj"))
                weight.normal_(0.0, weight.shape[-1] ** -0.5 * (2.5 if peaky else 1.0))
    theirs.save_pretrained(folder)
    theirs.generation_config.eos_token_id = None  # greedy tokens are compared to the end
    word_tokenizer(folder, VOCAB)
    return theirs


def word_tokenizer(folder: Path, size: int) -> None:
    """A tokenizer.json of `size` words "w0" .. in a model folder; id 1 begins, id 2 ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )


def ids_of(count: int, seed: int = 7) -> list[int]:
    """Random token ids, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB, (count,), generator=generator).tolist()
