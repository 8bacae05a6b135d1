"""The table of short model names that --list-models prints; a folder or a hub id works as well."""

import difflib
from dataclasses import dataclass

from weights.published_filters import PUBLISHED


@dataclass(frozen=True)
class Alias:
    """One model on the hub.

    context: tokens; params: elements of all weights; note: a remark for people, may be empty; rope:
    an override of config.json's that the model's card gives for this context ("yarn:4:32768").
    """

    hub_id: str
    context: int
    params: int
    note: str = ""
    rope: str | None = None

    @property
    def bytes_bf16(self) -> int:
        """Size of the weights in bfloat16."""
        return 2 * self.params

    @property
    def filter_layers(self) -> tuple[int, ...] | None:
        """OmniKV's filter layers as published (weights/published_filters.py), or None."""
        known = PUBLISHED.get(self.hub_id)
        return known.layers if known else None


_GATED = "gated: accept the licence on the hub"
_YARN = "rope of its card for long texts"
_BASE = "base model: completes text"
_MXFP4 = "MXFP4: on a CPU held as it is in a byte a weight, on a GPU in bfloat16 or --weights int4"

_LATENT = "latent attention: 576 values a token and layer"
_BESIDE = "hybrid: every layer attends beside Mamba-2"
_HYBRID = "hybrid: every fourth layer attends"

# Contexts and sizes: the models' cards; of the language model alone where there is a vision tower.
ALIASES: dict[str, Alias] = {
    "llama-3-8b-262k": Alias("gradientai/Llama-3-8B-Instruct-262k", 262144, 8_030_261_248),
    "llama-3-8b-1048k": Alias(
        "gradientai/Llama-3-8B-Instruct-Gradient-1048k", 1048576, 8_030_261_248
    ),
    "llama-3.1-8b": Alias("meta-llama/Llama-3.1-8B-Instruct", 131072, 8_030_261_248, _GATED),
    "llama-3.1-70b": Alias(
        "meta-llama/Llama-3.1-70B-Instruct",
        131072,
        70_553_706_496,
        f"{_GATED}; --weights int4 in 80 GB",
    ),
    "llama-3.2-1b": Alias("meta-llama/Llama-3.2-1B-Instruct", 131072, 1_235_814_400, _GATED),
    "llama-3.2-3b": Alias("meta-llama/Llama-3.2-3B-Instruct", 131072, 3_212_749_824, _GATED),
    "llama-2-7b": Alias("meta-llama/Llama-2-7b-chat-hf", 4096, 6_738_415_616, _GATED),
    "yi-6b-200k": Alias("01-ai/Yi-6B-200K", 200000, 6_061_035_520, _BASE),
    "yi-9b-200k": Alias("01-ai/Yi-9B-200K", 200000, 8_829_407_232, _BASE),
    "yi-34b-200k": Alias("01-ai/Yi-34B-200K", 200000, 34_388_917_248, _BASE),
    "mistral-7b": Alias("mistralai/Mistral-7B-Instruct-v0.3", 32768, 7_248_023_552),
    "mistral-nemo": Alias("mistralai/Mistral-Nemo-Instruct-2407", 131072, 12_247_782_400),
    "smollm2-135m": Alias(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        8192,
        134_515_008,
        "small: judges methods, answers little",
    ),
    "smollm3-3b": Alias("HuggingFaceTB/SmolLM3-3B", 65536, 3_075_098_624),
    "smollm3-3b-128k": Alias(
        "HuggingFaceTB/SmolLM3-3B", 131072, 3_075_098_624, _YARN, "yarn:2:65536"
    ),
    "r1-llama-8b": Alias("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", 131072, 8_030_261_248),
    "r1-qwen-7b": Alias("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", 131072, 7_615_616_512),
    "qwen2.5-0.5b": Alias("Qwen/Qwen2.5-0.5B-Instruct", 32768, 494_032_768),
    "qwen2.5-1.5b": Alias("Qwen/Qwen2.5-1.5B-Instruct", 32768, 1_543_714_304),
    "qwen2.5-3b": Alias("Qwen/Qwen2.5-3B-Instruct", 32768, 3_085_938_688, "licence: research only"),
    "qwen2.5-7b": Alias("Qwen/Qwen2.5-7B-Instruct", 32768, 7_615_616_512),
    "qwen2.5-7b-128k": Alias(
        "Qwen/Qwen2.5-7B-Instruct", 131072, 7_615_616_512, _YARN, "yarn:4:32768"
    ),
    "qwen2.5-14b": Alias("Qwen/Qwen2.5-14B-Instruct", 32768, 14_770_033_664),
    "qwen2.5-14b-128k": Alias(
        "Qwen/Qwen2.5-14B-Instruct", 131072, 14_770_033_664, _YARN, "yarn:4:32768"
    ),
    "qwen2.5-32b": Alias("Qwen/Qwen2.5-32B-Instruct", 32768, 32_763_876_352),
    "qwen2.5-7b-1m": Alias(
        "Qwen/Qwen2.5-7B-Instruct-1M", 262144, 7_615_616_512, "1M needs dual chunks: not yet"
    ),
    "qwen2.5-14b-1m": Alias(
        "Qwen/Qwen2.5-14B-Instruct-1M",
        262144,
        14_770_033_664,
        "1M needs dual chunks: not yet",
    ),
    "qwen3-0.6b": Alias("Qwen/Qwen3-0.6B", 40960, 596_049_920),
    "qwen3-1.7b": Alias("Qwen/Qwen3-1.7B", 40960, 1_720_574_976),
    "qwen3-4b": Alias("Qwen/Qwen3-4B", 40960, 4_022_468_096),
    "qwen3-4b-2507": Alias("Qwen/Qwen3-4B-Instruct-2507", 262144, 4_022_468_096),
    "qwen3-8b": Alias("Qwen/Qwen3-8B", 40960, 8_190_735_360),
    "qwen3-8b-128k": Alias("Qwen/Qwen3-8B", 131072, 8_190_735_360, _YARN, "yarn:4:32768"),
    "qwen3-14b": Alias("Qwen/Qwen3-14B", 40960, 14_768_307_200),
    "qwen3-30b-a3b-2507": Alias(
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        262144,
        30_532_122_624,
        "8 of 128 experts a token: 3.3B read",
    ),
    "qwen3-32b": Alias("Qwen/Qwen3-32B", 40960, 32_762_123_264),
    "qwen3-next-80b-a3b": Alias(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        262144,
        79_674_391_296,
        f"10 of 512 experts a token; {_HYBRID}",
    ),
    "qwen3.5-0.8b": Alias("Qwen/Qwen3.5-0.8B", 262144, 752_393_024, _HYBRID),
    "qwen3.5-2b": Alias("Qwen/Qwen3.5-2B", 262144, 1_881_825_088, _HYBRID),
    "qwen3.5-4b": Alias("Qwen/Qwen3.5-4B", 262144, 4_205_751_296, _HYBRID),
    "qwen3.5-27b": Alias("Qwen/Qwen3.5-27B", 262144, 26_895_998_464, _HYBRID),
    "qwen3.5-35b-a3b": Alias(
        "Qwen/Qwen3.5-35B-A3B", 262144, 34_660_610_688, f"8 of 256 experts a token; {_HYBRID}"
    ),
    "qwen3.6-27b": Alias("Qwen/Qwen3.6-27B", 262144, 26_895_998_464, _HYBRID),
    "qwen3.6-35b-a3b": Alias(
        "Qwen/Qwen3.6-35B-A3B", 262144, 34_660_610_688, f"8 of 256 experts a token; {_HYBRID}"
    ),
    "phi-3.5-mini": Alias("microsoft/Phi-3.5-mini-instruct", 131072, 3_821_079_552),
    "phi-4-mini": Alias("microsoft/Phi-4-mini-instruct", 131072, 3_836_021_760),
    "phi-4": Alias("microsoft/phi-4", 16384, 14_659_507_200),
    "granite-3.3-8b": Alias("ibm-granite/granite-3.3-8b-instruct", 131072, 8_170_864_640),
    "granite-4-h-micro": Alias("ibm-granite/granite-4.0-h-micro", 131072, 3_191_396_096),
    "granite-4-h-tiny": Alias(
        "ibm-granite/granite-4.0-h-tiny",
        131072,
        6_939_037_248,
        "6 of 64 experts a token: 1.5B read",
    ),
    "granite-4-h-small": Alias(
        "ibm-granite/granite-4.0-h-small",
        131072,
        32_207_337_984,
        "10 of 72 experts a token: 8.8B read",
    ),
    "nemotron-nano-9b-v2": Alias("nvidia/NVIDIA-Nemotron-Nano-9B-v2", 131072, 8_888_227_328),
    "falcon-h1-0.5b": Alias("tiiuae/Falcon-H1-0.5B-Instruct", 16384, 521_411_104, _BESIDE),
    "falcon-h1-1.5b": Alias("tiiuae/Falcon-H1-1.5B-Instruct", 131072, 1_554_789_760, _BESIDE),
    "falcon-h1-7b": Alias("tiiuae/Falcon-H1-7B-Instruct", 262144, 7_585_513_568, _BESIDE),
    "bamba-9b": Alias(
        "ibm-ai-platform/Bamba-9B-v2",
        4096,
        9_780_235_392,
        f"{_BASE}; hybrid: 3 of 32 layers attend",
    ),
    "olmo-2-7b": Alias("allenai/OLMo-2-1124-7B-Instruct", 4096, 7_298_617_344),
    "gemma-3-270m": Alias("google/gemma-3-270m-it", 32768, 268_098_176, _GATED),
    "gemma-3-1b": Alias("google/gemma-3-1b-it", 32768, 999_885_952, _GATED),
    "gemma-4-e2b": Alias(
        "google/gemma-4-E2B-it",
        131072,
        4_628_569_379,
        "7 of 35 layers see everything, 3 of them keep rows",
    ),
    "gemma-4-e4b": Alias(
        "google/gemma-4-E4B-it",
        131072,
        7_463_013_418,
        "7 of 42 layers see everything, 4 of them keep rows",
    ),
    "gemma-4-26b-a4b": Alias(
        "google/gemma-4-26B-A4B-it",
        262144,
        25_233_141_790,
        "8 of 128 experts a token; 5 of 30 layers see everything",
    ),
    "gemma-4-31b": Alias(
        "google/gemma-4-31B-it", 262144, 30_697_345_340, "10 of 60 layers see everything"
    ),
    "gemma-2-2b": Alias("google/gemma-2-2b-it", 8192, 2_614_341_888, _GATED),
    "gemma-2-9b": Alias("google/gemma-2-9b-it", 8192, 9_241_705_984, _GATED),
    "gemma-2-27b": Alias("google/gemma-2-27b-it", 8192, 27_227_128_320, _GATED),
    "deepseek-v2-lite": Alias(
        "deepseek-ai/DeepSeek-V2-Lite-Chat", 32768, 15_706_484_224, f"{_LATENT}; 2.4B read"
    ),
    "deepseek-coder-v2-lite": Alias(
        "deepseek-ai/DeepSeek-Coder-V2-Lite-Instruct",
        163840,
        15_706_484_224,
        f"{_LATENT}; 2.4B read",
    ),
    "deepseek-v3": Alias(
        "deepseek-ai/DeepSeek-V3-0324",
        163840,
        671_026_419_200,
        f"{_LATENT}; 37B read; stored in fp8",
    ),
    "deepseek-r1": Alias(
        "deepseek-ai/DeepSeek-R1-0528",
        163840,
        671_026_419_200,
        f"{_LATENT}; 37B read; stored in fp8",
    ),
    "glm-4.7-flash": Alias(
        "zai-org/GLM-4.7-Flash", 202752, 29_943_393_920, f"{_LATENT}; 4 of 64 experts a token"
    ),
    "minicpm3-4b": Alias(
        "openbmb/MiniCPM3-4B",
        32768,
        4_073_875_968,
        "latent attention: 288 values a token and layer",
    ),
    "minimax-m2": Alias(
        "MiniMaxAI/MiniMax-M2",
        196608,
        228_689_764_864,
        "8 of 256 experts a token: 11.0B read; stored in fp8",
    ),
    "gpt-oss-20b": Alias(
        "openai/gpt-oss-20b",
        131072,
        20_914_757_184,
        f"4 of 32 experts a token: 3.6B read; {_MXFP4}",
    ),
    "gpt-oss-120b": Alias(
        "openai/gpt-oss-120b",
        131072,
        116_829_156_672,
        f"4 of 128 experts a token: 5.1B read; {_MXFP4}",
    ),
}


def suggest(name: str, most: int = 3) -> list[str]:
    """Find the aliases and hub ids of the table nearest to `name`, best first; may be empty."""
    known = {_plain(alias): alias for alias in ALIASES}
    known |= {_plain(entry.hub_id): entry.hub_id for entry in ALIASES.values()}
    wanted = _plain(name)[:100]
    near = difflib.get_close_matches(wanted, known, n=most, cutoff=0.6)
    near += [key for key in known if wanted and (key.startswith(wanted) or wanted.startswith(key))]
    return [known[key] for key in dict.fromkeys(near)][:most]


def _plain(name: str) -> str:
    """Keep letters, digits and the slash only: people forget where hyphens and dots go."""
    return "".join(c for c in name.lower() if c.isalnum() or c == "/")


def table() -> str:
    """Format the aliases as aligned text, one line each under a head line."""
    head = ("name", "hub id", "context", "size", "filter layers (published)", "note")
    rows = [
        (
            name,
            a.hub_id,
            f"{a.context}",
            f"{a.params / 1e9:.1f}B, {a.bytes_bf16 / 1e9:.1f} GB",
            ",".join(map(str, a.filter_layers or ())) or "-",
            a.note,
        )
        for name, a in ALIASES.items()
    ]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = (
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
        for row in [head, *rows]
    )
    return "\n".join(line.rstrip() for line in lines)
