"""OmniKV inference for Llama-architecture models. The public names are these; everything else may
move.

They are imported when they are first used, so that a program is there at once: torch takes seconds.
A type checker reads them from engine/__init__.pyi.
"""

from __future__ import annotations

import importlib
from typing import Any

import engine.base.cores.openmp  # noqa: F401  before torch: says how many threads, and how they wait

_HOMES = {
    "AsyncLLM": "engine.asynchronous.llm",
    "EngineError": "engine.base.errors",
    "LLM": "engine.llm",
    "A2SF": "engine.methods.evict.a2sf",
    "AdaPyramid": "engine.methods.evict.ada_snapkv",
    "AdaSnapKV": "engine.methods.evict.ada_snapkv",
    "ClusterKV": "engine.methods.select.index.clusterkv",
    "DoubleSparsity": "engine.methods.select.index.double_sparsity",
    "Duo": "engine.methods.evict.duo",
    "EMLLM": "engine.methods.select.events.em_llm",
    "ExpectedAttention": "engine.methods.evict.expected_attention",
    "FastGen": "engine.methods.evict.fastgen",
    "H2O": "engine.methods.evict.h2o",
    "H2OPlus": "engine.methods.evict.h2o_plus",
    "Keyformer": "engine.methods.evict.keyformer",
    "KVzip": "engine.methods.evict.kvzip",
    "LMInfinite": "engine.methods.evict.lm_infinite",
    "Longformer": "engine.methods.evict.longformer",
    "PodSnapKV": "engine.methods.evict.pod_snapkv",
    "PQCache": "engine.methods.select.index.pqcache",
    "PyramidKV": "engine.methods.evict.pyramidkv",
    "RandomEviction": "engine.methods.evict.random_eviction",
    "RandomEvictionAll": "engine.methods.evict.random_eviction",
    "Razor": "engine.methods.evict.razor",
    "RKV": "engine.methods.evict.rkv",
    "RoCo": "engine.methods.evict.roco",
    "RocketKV": "engine.methods.select.rocket.rocketkv",
    "Scissorhands": "engine.methods.evict.scissorhands",
    "ShadowKV": "engine.methods.select.shadow.shadowkv",
    "SirLLM": "engine.methods.evict.sirllm",
    "SnapKV": "engine.methods.evict.snapkv",
    "SnapKVPlus": "engine.methods.evict.snapkv_plus",
    "SparQ": "engine.methods.select.index.sparq",
    "A2ATS": "engine.methods.select.taught.a2ats",
    "InfiniGen": "engine.methods.select.varying.infinigen",
    "MagicPIG": "engine.methods.select.varying.magicpig",
    "StreamingLLM": "engine.methods.evict.streaming_llm",
    "VaSE": "engine.methods.evict.vase",
    "Window": "engine.methods.evict.window",
    "ZigZagKV": "engine.methods.evict.zigzagkv",
    "Exact": "engine.methods.exact",
    "Full": "engine.methods.full",
    "OmniKV": "engine.methods.omnikv.method",
    "RankedLLM": "engine.ranks.llm",
    "OracleTopK": "engine.methods.oracle.topk",
    "OracleTopP": "engine.methods.oracle.topp",
    "RandomTopK": "engine.methods.oracle.random_topk",
    "Delta": "engine.methods.select.across.delta",
    "HShare": "engine.methods.select.across.hshare",
    "Kascade": "engine.methods.select.across.kascade",
    "KascadeTiles": "engine.methods.prompts.kascade_tiles",
    "LessIsMore": "engine.methods.select.across.less_is_more",
    "OmniKVHeads": "engine.methods.select.across.omnikv_heads",
    "OmniKVTopP": "engine.methods.select.across.omnikv_top_p",
    "InfLLM": "engine.methods.select.infllm",
    "MInference": "engine.methods.select.minference",
    "PodUntrained": "engine.methods.select.pod",
    "Quest": "engine.methods.select.quest",
    "QuoKA": "engine.methods.prompts.quoka",
    "XAttention": "engine.methods.prompts.xattention",
    "TidalDecode": "engine.methods.select.tidaldecode",
    "RetroInfer": "engine.methods.select.wave.retroinfer",
    "WindowRecompute": "engine.methods.window_recompute",
    "SamplingParams": "engine.sampling.params",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """A public name, from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
