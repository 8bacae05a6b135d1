"""The model: its configuration, rotary embedding and the two halves of a block."""

from engine.model.config import ModelConfig
from engine.model.llama import (
    Layer,
    Llama,
    assemble,
    ignored,
    post_attention,
    pre_attention,
    random_stream,
    rms_norm,
    targets,
)

__all__ = [
    "Layer",
    "Llama",
    "ModelConfig",
    "post_attention",
    "assemble",
    "pre_attention",
    "ignored",
    "random_stream",
    "rms_norm",
    "targets",
]
