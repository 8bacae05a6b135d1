"""OmniKV inference for Llama-architecture models. The public names are these; everything else may move."""

from engine.errors import EngineError
from engine.llm import LLM
from engine.methods.full import Full
from engine.methods.minference import MInference
from engine.methods.omnikv import OmniKV
from engine.methods.pod import PodUntrained
from engine.methods.quest import Quest
from engine.methods.tidaldecode import TidalDecode
from engine.sampling import SamplingParams

__all__ = ["LLM", "EngineError", "Full", "MInference", "OmniKV", "PodUntrained", "Quest", "SamplingParams", "TidalDecode"]
