"""The public names, as a type checker sees them; engine/__init__.py imports them lazily."""

from engine.asynchronous.llm import AsyncLLM as AsyncLLM
from engine.base.errors import EngineError as EngineError
from engine.llm import LLM as LLM
from engine.methods.evict.a2sf import A2SF as A2SF
from engine.methods.evict.ada_snapkv import AdaPyramid as AdaPyramid
from engine.methods.evict.ada_snapkv import AdaSnapKV as AdaSnapKV
from engine.methods.evict.h2o import H2O as H2O
from engine.methods.evict.h2o_plus import H2OPlus as H2OPlus
from engine.methods.evict.keyformer import Keyformer as Keyformer
from engine.methods.evict.lm_infinite import LMInfinite as LMInfinite
from engine.methods.evict.pyramidkv import PyramidKV as PyramidKV
from engine.methods.evict.scissorhands import Scissorhands as Scissorhands
from engine.methods.evict.snapkv import SnapKV as SnapKV
from engine.methods.evict.streaming_llm import StreamingLLM as StreamingLLM
from engine.methods.evict.window import Window as Window
from engine.methods.exact import Exact as Exact
from engine.methods.full import Full as Full
from engine.methods.omnikv.method import OmniKV as OmniKV
from engine.methods.select.infllm import InfLLM as InfLLM
from engine.methods.select.minference import MInference as MInference
from engine.methods.select.pod import PodUntrained as PodUntrained
from engine.methods.select.quest import Quest as Quest
from engine.methods.select.tidaldecode import TidalDecode as TidalDecode
from engine.sampling.params import SamplingParams as SamplingParams
