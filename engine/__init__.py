"""OmniKV inference for Llama-architecture models. The public names are these; everything else may
move.

They are imported when they are first used, so that a program is there at once: torch takes seconds.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import kernels.openmp  # noqa: F401  before torch: says how its threads wait

if TYPE_CHECKING:
    from engine.errors import EngineError
    from engine.llm import LLM
    from engine.methods.evict.a2sf import A2SF
    from engine.methods.evict.ada_pyramid import AdaPyramid
    from engine.methods.evict.ada_snapkv import AdaSnapKV
    from engine.methods.evict.h2o import H2O
    from engine.methods.evict.h2o_plus import H2OPlus
    from engine.methods.evict.keyformer import Keyformer
    from engine.methods.evict.lm_infinite import LMInfinite
    from engine.methods.evict.pyramidkv import PyramidKV
    from engine.methods.evict.scissorhands import Scissorhands
    from engine.methods.evict.snapkv import SnapKV
    from engine.methods.evict.streaming_llm import StreamingLLM
    from engine.methods.evict.window import Window
    from engine.methods.exact import Exact
    from engine.methods.full import Full
    from engine.methods.omnikv.settings import OmniKV
    from engine.methods.select.infllm import InfLLM
    from engine.methods.select.minference import MInference
    from engine.methods.select.pod import PodUntrained
    from engine.methods.select.quest import Quest
    from engine.methods.select.tidaldecode import TidalDecode
    from engine.sampling import SamplingParams

__all__ = [
    "A2SF",
    "LLM",
    "AdaPyramid",
    "AdaSnapKV",
    "EngineError",
    "Exact",
    "Full",
    "H2O",
    "H2OPlus",
    "InfLLM",
    "Keyformer",
    "LMInfinite",
    "MInference",
    "OmniKV",
    "PodUntrained",
    "PyramidKV",
    "Quest",
    "SamplingParams",
    "Scissorhands",
    "SnapKV",
    "StreamingLLM",
    "TidalDecode",
    "Window",
]

_HOMES = {
    "EngineError": "engine.errors",
    "LLM": "engine.llm",
    "A2SF": "engine.methods.evict.a2sf",
    "AdaPyramid": "engine.methods.evict.ada_pyramid",
    "AdaSnapKV": "engine.methods.evict.ada_snapkv",
    "H2O": "engine.methods.evict.h2o",
    "H2OPlus": "engine.methods.evict.h2o_plus",
    "Keyformer": "engine.methods.evict.keyformer",
    "LMInfinite": "engine.methods.evict.lm_infinite",
    "PyramidKV": "engine.methods.evict.pyramidkv",
    "Scissorhands": "engine.methods.evict.scissorhands",
    "SnapKV": "engine.methods.evict.snapkv",
    "StreamingLLM": "engine.methods.evict.streaming_llm",
    "Window": "engine.methods.evict.window",
    "Exact": "engine.methods.exact",
    "Full": "engine.methods.full",
    "OmniKV": "engine.methods.omnikv.settings",
    "InfLLM": "engine.methods.select.infllm",
    "MInference": "engine.methods.select.minference",
    "PodUntrained": "engine.methods.select.pod",
    "Quest": "engine.methods.select.quest",
    "TidalDecode": "engine.methods.select.tidaldecode",
    "SamplingParams": "engine.sampling",
}


def __getattr__(name: str) -> Any:
    """A public name, from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
