"""The model: its configuration, its rotary embedding and the two halves of a layer."""

from engine.model.config.config import ModelConfig
from engine.model.llama import Layer, Llama, assemble, post_attention, pre_attention, rms_norm
from engine.model.tensors import ignored, random_stream, targets

__all__ = [
    "Layer",
    "Llama",
    "ModelConfig",
    "assemble",
    "ignored",
    "post_attention",
    "pre_attention",
    "random_stream",
    "rms_norm",
    "targets",
]
