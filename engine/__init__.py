"""OmniKV inference for Llama-architecture models. The public names are these; everything else may move."""

from engine.errors import EngineError
from engine.llm import LLM
from engine.methods.a2sf import A2SF
from engine.methods.ada_pyramid import AdaPyramid
from engine.methods.ada_snapkv import AdaSnapKV
from engine.methods.full import Full
from engine.methods.h2o import H2O
from engine.methods.h2o_plus import H2OPlus
from engine.methods.infllm import InfLLM
from engine.methods.keyformer import Keyformer
from engine.methods.lm_infinite import LMInfinite
from engine.methods.minference import MInference
from engine.methods.omnikv import OmniKV
from engine.methods.pod import PodUntrained
from engine.methods.pyramidkv import PyramidKV
from engine.methods.quest import Quest
from engine.methods.scissorhands import Scissorhands
from engine.methods.snapkv import SnapKV
from engine.methods.streaming_llm import StreamingLLM
from engine.methods.tidaldecode import TidalDecode
from engine.methods.window import Window
from engine.sampling import SamplingParams

__all__ = ["A2SF", "LLM", "AdaPyramid", "AdaSnapKV", "EngineError", "Full", "H2O", "H2OPlus", "InfLLM", "Keyformer", "LMInfinite",
           "MInference", "OmniKV", "PodUntrained", "PyramidKV", "Quest", "SamplingParams", "Scissorhands", "SnapKV", "StreamingLLM",
           "TidalDecode", "Window"]
