"""The model: its configuration, rotary embedding and the two halves of a block."""

from engine.model.config import ModelConfig
from engine.model.llama import (
    Layer,
    Llama,
    after,
    assemble,
    before,
    ignored,
    random_stream,
    rms_norm,
    targets,
)

__all__ = [
    "Layer",
    "Llama",
    "ModelConfig",
    "after",
    "assemble",
    "before",
    "ignored",
    "random_stream",
    "rms_norm",
    "targets",
]
