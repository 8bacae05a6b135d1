"""OmniKV inference for Llama-architecture models. The public names are these; everything else may
move.
"""

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
