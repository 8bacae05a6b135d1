"""OmniKV: filter layers attend to everything and choose what the layers after them read."""

from engine.methods.omnikv.settings import OmniKV, OmniKVRuntime

__all__ = [
    "OmniKV",
    "OmniKVRuntime",
]
