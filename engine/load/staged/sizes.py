"""Bytes of each layer's matrices as they will be held, counted before anything is read."""

from __future__ import annotations

import math

import torch

from engine.load.ahead.launches import held_as
from engine.model.config.config import ModelConfig
from engine.model.llama import PACKED
from engine.model.low_bits import Rounding
from engine.model.tensors import targets


def layer_sizes(
    config: ModelConfig,
    rounding: Rounding,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
) -> tuple[int, ...]:
    """Return the bytes of the matrices of every layer, with their biases, as `assemble` will pack
    them.
    """
    found = [0] * config.num_layers
    for target in targets(config):
        number, _, rest = target.name.partition(".")
        base = rest.removesuffix(".bias")
        if not number.isdigit() or base.rpartition(".")[2] not in PACKED:
            continue
        shape = target.shape
        one = held_as(rounding, target.name, shape) if len(shape) == 2 else None
        if one is None:
            size = math.prod(shape) * dtype.itemsize
        else:
            pair = shape[0], shape[1]
            size = one.bytes(pair, one.form(pair, dtype, device, backend))
        found[int(number)] += size
    return tuple(found)
