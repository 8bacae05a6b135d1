"""OmniKV: filter layers attend to everything and choose what the layers after them read."""

from engine.methods.omnikv.runtime import OmniKVRuntime
from engine.methods.omnikv.settings import OmniKV

__all__ = [
    "OmniKV",
    "OmniKVRuntime",
]
