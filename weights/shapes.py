"""The shapes of the models in the alias table, as their config.json on the hub gives them: enough
to plan a model without fetching anything.
"""

from __future__ import annotations

from typing import Any

from weights.aliases import Alias

_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
)
_LLAMA3_8B = (4096, 14336, 32, 32, 8, 128, 128256, False)
_GEMMA3 = {"sliding_window": 512, "sliding_window_pattern": 6}
_GEMMA4 = {
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "sliding_window": 512,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
_GPT_OSS = {
    "quantization_config": {"quant_method": "mxfp4"},
    "num_experts_per_tok": 4,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}
_DELTA = {
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
_QWEN35_27B = (
    "Qwen3_5",
    (5120, 17408, 64, 24, 4, 256, 248320, False),
    _DELTA | {"linear_num_value_heads": 48},
)
_QWEN35_35B = (
    "Qwen3_5Moe",
    (2048, 512, 40, 16, 2, 256, 248320, False),
    _DELTA
    | {
        "linear_num_value_heads": 32,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
)
_ONE_MILLION = {"dual_chunk_attention_config": {"chunk_size": 262144}}
# Granite 4's models of four layers with attention
_GRANITE4 = {
    "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
    "mamba_d_state": 128,
    "position_embedding_type": "nope",
}
_GRANITE4_MICRO = {"mamba_n_heads": 64, "num_local_experts": 0, "shared_intermediate_size": 8192}
_GRANITE4_TINY = {
    "mamba_n_heads": 48,
    "num_local_experts": 64,
    "num_experts_per_tok": 6,
    "shared_intermediate_size": 1024,
}
_GRANITE4_SMALL = {
    "mamba_n_heads": 128,
    "num_local_experts": 72,
    "num_experts_per_tok": 10,
    "shared_intermediate_size": 1536,
}
_NEMOTRON_NANO2 = {
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
    "n_groups": 8,
    "ssm_state_size": 128,
    "layer_norm_epsilon": 1e-5,
}
_DEEPSEEK_LITE = {
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_DEEPSEEK_V3 = {
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
}
_DEEPSEEK_V3_SIZES = (7168, 18432, 61, 128, 128, None, 129280, False)
_GLM_FLASH = {
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_group": 1,
    "topk_group": 1,
}
_MINICPM3 = {
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
# hub id: (family, sizes in the order of _KEYS, other fields)
_SHAPES: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "gradientai/Llama-3-8B-Instruct-262k": ("Llama", _LLAMA3_8B, {}),
    "gradientai/Llama-3-8B-Instruct-Gradient-1048k": ("Llama", _LLAMA3_8B, {}),
    "meta-llama/Llama-3.1-8B-Instruct": ("Llama", _LLAMA3_8B, {}),
    "meta-llama/Llama-3.1-70B-Instruct": (
        "Llama",
        (8192, 28672, 80, 64, 8, 128, 128256, False),
        {},
    ),
    "meta-llama/Llama-3.2-1B-Instruct": ("Llama", (2048, 8192, 16, 32, 8, 64, 128256, True), {}),
    "meta-llama/Llama-3.2-3B-Instruct": ("Llama", (3072, 8192, 28, 24, 8, 128, 128256, True), {}),
    "meta-llama/Llama-2-7b-chat-hf": ("Llama", (4096, 11008, 32, 32, 32, 128, 32000, False), {}),
    "01-ai/Yi-6B-200K": ("Llama", (4096, 11008, 32, 32, 4, 128, 64000, False), {}),
    "01-ai/Yi-9B-200K": ("Llama", (4096, 11008, 48, 32, 4, 128, 64000, False), {}),
    "01-ai/Yi-34B-200K": ("Llama", (7168, 20480, 60, 56, 8, 128, 64000, False), {}),
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("Llama", (576, 1536, 30, 9, 3, 64, 49152, True), {}),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": ("Llama", _LLAMA3_8B, {}),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": (
        "Qwen2",
        (3584, 18944, 28, 28, 4, 128, 152064, False),
        {},
    ),
    "mistralai/Mistral-7B-Instruct-v0.3": (
        "Mistral",
        (4096, 14336, 32, 32, 8, 128, 32768, False),
        {},
    ),
    "mistralai/Mistral-Nemo-Instruct-2407": (
        "Mistral",
        (5120, 14336, 40, 32, 8, 128, 131072, False),
        {},
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": ("Qwen2", (896, 4864, 24, 14, 2, 64, 151936, True), {}),
    "Qwen/Qwen2.5-1.5B-Instruct": ("Qwen2", (1536, 8960, 28, 12, 2, 128, 151936, True), {}),
    "Qwen/Qwen2.5-3B-Instruct": ("Qwen2", (2048, 11008, 36, 16, 2, 128, 151936, True), {}),
    "Qwen/Qwen2.5-7B-Instruct": ("Qwen2", (3584, 18944, 28, 28, 4, 128, 152064, False), {}),
    "Qwen/Qwen2.5-14B-Instruct": ("Qwen2", (5120, 13824, 48, 40, 8, 128, 152064, False), {}),
    "Qwen/Qwen2.5-32B-Instruct": ("Qwen2", (5120, 27648, 64, 40, 8, 128, 152064, False), {}),
    "Qwen/Qwen2.5-7B-Instruct-1M": (
        "Qwen2",
        (3584, 18944, 28, 28, 4, 128, 152064, False),
        _ONE_MILLION,
    ),
    "Qwen/Qwen2.5-14B-Instruct-1M": (
        "Qwen2",
        (5120, 13824, 48, 40, 8, 128, 152064, False),
        _ONE_MILLION,
    ),
    "Qwen/Qwen3-0.6B": ("Qwen3", (1024, 3072, 28, 16, 8, 128, 151936, True), {}),
    "Qwen/Qwen3-1.7B": ("Qwen3", (2048, 6144, 28, 16, 8, 128, 151936, True), {}),
    "Qwen/Qwen3-4B": ("Qwen3", (2560, 9728, 36, 32, 8, 128, 151936, True), {}),
    "Qwen/Qwen3-4B-Instruct-2507": ("Qwen3", (2560, 9728, 36, 32, 8, 128, 151936, True), {}),
    "Qwen/Qwen3-8B": ("Qwen3", (4096, 12288, 36, 32, 8, 128, 151936, False), {}),
    "Qwen/Qwen3-14B": ("Qwen3", (5120, 17408, 40, 40, 8, 128, 151936, False), {}),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (
        "Qwen3Moe",
        (2048, 6144, 48, 32, 4, 128, 151936, False),
        {
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
    ),
    "Qwen/Qwen3-32B": ("Qwen3", (5120, 25600, 64, 64, 8, 128, 151936, False), {}),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        "Qwen3Next",
        (2048, 5120, 48, 16, 2, 256, 151936, False),
        _DELTA
        | {
            "linear_num_value_heads": 32,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
        },
    ),
    "Qwen/Qwen3.5-0.8B": (
        "Qwen3_5",
        (1024, 3584, 24, 8, 2, 256, 248320, True),
        _DELTA | {"linear_num_value_heads": 16},
    ),
    "Qwen/Qwen3.5-2B": (
        "Qwen3_5",
        (2048, 6144, 24, 8, 2, 256, 248320, True),
        _DELTA | {"linear_num_value_heads": 16},
    ),
    "Qwen/Qwen3.5-4B": (
        "Qwen3_5",
        (2560, 9216, 32, 16, 4, 256, 248320, True),
        _DELTA | {"linear_num_value_heads": 32},
    ),
    "Qwen/Qwen3.5-27B": _QWEN35_27B,
    "Qwen/Qwen3.6-27B": _QWEN35_27B,
    "Qwen/Qwen3.5-35B-A3B": _QWEN35_35B,
    "Qwen/Qwen3.6-35B-A3B": _QWEN35_35B,
    "HuggingFaceTB/SmolLM3-3B": ("SmolLM3", (2048, 11008, 36, 16, 4, 128, 128256, True), {}),
    "microsoft/Phi-3.5-mini-instruct": ("Phi3", (3072, 8192, 32, 32, 32, 96, 32064, False), {}),
    "microsoft/Phi-4-mini-instruct": (
        "Phi3",
        (3072, 8192, 32, 24, 8, 128, 200064, True),
        {"partial_rotary_factor": 0.75},
    ),
    "microsoft/phi-4": ("Phi3", (5120, 17920, 40, 40, 10, 128, 100352, False), {}),
    "ibm-granite/granite-4.0-h-micro": (
        "GraniteMoeHybrid",
        (2048, 8192, 40, 32, 8, 64, 100352, True),
        {**_GRANITE4, **_GRANITE4_MICRO},
    ),
    "ibm-granite/granite-4.0-h-tiny": (
        "GraniteMoeHybrid",
        (1536, 512, 40, 12, 4, 128, 100352, True),
        {**_GRANITE4, **_GRANITE4_TINY},
    ),
    "ibm-granite/granite-4.0-h-small": (
        "GraniteMoeHybrid",
        (4096, 768, 40, 32, 8, 128, 100352, True),
        {**_GRANITE4, **_GRANITE4_SMALL},
    ),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": (
        "NemotronH",
        (4480, 15680, 56, 40, 8, 128, 131072, False),
        {
            **_NEMOTRON_NANO2,
            "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
        },
    ),
    "tiiuae/Falcon-H1-0.5B-Instruct": (
        "FalconH1",
        (1024, 2048, 36, 8, 2, 64, 32784, False),
        {"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128},
    ),
    "tiiuae/Falcon-H1-1.5B-Instruct": (
        "FalconH1",
        (2048, 4608, 24, 8, 2, 128, 65537, False),
        {"mamba_d_ssm": 3072, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 256},
    ),
    "tiiuae/Falcon-H1-7B-Instruct": (
        "FalconH1",
        (3072, 12288, 44, 12, 2, 128, 130048, False),
        {"mamba_d_ssm": 3072, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_state": 256},
    ),
    "ibm-ai-platform/Bamba-9B-v2": (
        "Bamba",
        (4096, 14336, 32, 32, 8, 128, 128256, False),
        {
            "attn_layer_indices": [9, 18, 27],
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
        },
    ),
    "ibm-granite/granite-3.3-8b-instruct": (
        "Granite",
        (4096, 12800, 40, 32, 8, 128, 49159, True),
        {},
    ),
    "allenai/OLMo-2-1124-7B-Instruct": (
        "Olmo2",
        (4096, 11008, 32, 32, 32, 128, 100352, False),
        {},
    ),
    "google/gemma-3-270m-it": ("Gemma3", (640, 2048, 18, 4, 1, 256, 262144, True), _GEMMA3),
    "google/gemma-3-1b-it": ("Gemma3", (1152, 6912, 26, 4, 1, 256, 262144, True), _GEMMA3),
    "google/gemma-2-2b-it": ("Gemma2", (2304, 9216, 26, 8, 4, 256, 256000, True), {}),
    "google/gemma-2-9b-it": ("Gemma2", (3584, 14336, 42, 16, 8, 256, 256000, True), {}),
    "google/gemma-2-27b-it": (
        "Gemma2",
        (4608, 36864, 46, 32, 16, 128, 256000, True),
        {"query_pre_attn_scalar": 144},
    ),
    "google/gemma-4-E2B-it": (
        "Gemma4",
        (1536, 6144, 35, 8, 1, 256, 262144, True),
        _GEMMA4
        | {
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
        },
    ),
    "google/gemma-4-E4B-it": (
        "Gemma4",
        (2560, 10240, 42, 8, 2, 256, 262144, True),
        _GEMMA4 | {"num_kv_shared_layers": 18},
    ),
    "google/gemma-4-26B-A4B-it": (
        "Gemma4",
        (2816, 2112, 30, 16, 8, 256, 262144, True),
        _GEMMA4
        | {
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 1024,
            "enable_moe_block": True,
            "num_experts": 128,
            "top_k_experts": 8,
            "moe_intermediate_size": 704,
        },
    ),
    "google/gemma-4-31B-it": (
        "Gemma4",
        (5376, 21504, 60, 32, 16, 256, 262144, True),
        _GEMMA4
        | {
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 1024,
        },
    ),
    "deepseek-ai/DeepSeek-V2-Lite-Chat": (
        "DeepseekV2",
        (2048, 10944, 27, 16, 16, None, 102400, False),
        _DEEPSEEK_LITE,
    ),
    "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct": (
        "DeepseekV2",
        (2048, 10944, 27, 16, 16, None, 102400, False),
        _DEEPSEEK_LITE,
    ),
    "deepseek-ai/DeepSeek-V3-0324": ("DeepseekV3", _DEEPSEEK_V3_SIZES, _DEEPSEEK_V3),
    "deepseek-ai/DeepSeek-R1-0528": ("DeepseekV3", _DEEPSEEK_V3_SIZES, _DEEPSEEK_V3),
    "zai-org/GLM-4.7-Flash": (
        "Glm4MoeLite",
        (2048, 10240, 47, 20, 20, None, 154880, False),
        _GLM_FLASH,
    ),
    "openbmb/MiniCPM3-4B": (
        "MiniCPM3",
        (2560, 6400, 62, 40, 40, None, 73448, True),
        _MINICPM3,
    ),
    "MiniMaxAI/MiniMax-M2": (
        "MiniMaxM2",
        (3072, 1536, 62, 48, 8, 128, 200064, False),
        {"num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": 64},
    ),
    "openai/gpt-oss-20b": (
        "GptOss",
        (2880, 2880, 24, 64, 8, 64, 201088, False),
        _GPT_OSS | {"num_local_experts": 32},
    ),
    "openai/gpt-oss-120b": (
        "GptOss",
        (2880, 2880, 36, 64, 8, 64, 201088, False),
        _GPT_OSS | {"num_local_experts": 128},
    ),
}


def config_of(alias: Alias) -> dict[str, Any]:
    """Return what a plan needs of an alias's config.json. The rope is the family's default; it
    costs no memory.
    """
    family, sizes, more = _SHAPES[alias.hub_id]
    return {
        "architectures": [f"{family}ForCausalLM"],
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": alias.context,
        "torch_dtype": "bfloat16",
        **({"sliding_window": None} if family == "Mistral" else {}),
        **dict(zip(_KEYS, sizes, strict=True)),
        **more,
    }
