"""OmniKV: filter layers attend to everything and choose what the layers after them read."""

from engine.methods.omnikv.method import OmniKV
from engine.methods.omnikv.runtime import OmniKVRuntime

__all__ = [
    "OmniKV",
    "OmniKVRuntime",
]
