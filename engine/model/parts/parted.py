"""A loaded model as parts, of the same memory, and its weights on the way to their devices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch

from engine.model.config.config import ModelConfig
from engine.model.llama import Llama
from engine.model.parts.config import part_of
from engine.model.rope import Rotary
from kernels.quant.matrix import Quantised

FIRST = ("embed", "layer_embed", "layer_inputs", "altup.spread")  # of no layer's number


def parted(
    model: Llama, config: ModelConfig, starts: Sequence[int], devices: Sequence[torch.device]
) -> Llama:
    """The model with its parts: part i has the layers starts[i] .. starts[i + 1] - 1, which lie on
    devices[i]. config: of the whole. Layers that stream in parts of the same cut still do.
    """
    rings = [part.staged for part in model.parts] or [None] * len(devices)
    parts = tuple(
        replace(
            model,
            config=part_of(config, first, stop),
            device=device,
            layers=model.layers[first:stop],
            per_layer=model.per_layer and model.per_layer.of_part(first, stop),
            altup=model.altup and model.altup.of_part(first, stop),
            staged=ring,
            parts=(),
        )
        for (first, stop), device, ring in zip(pairwise(starts), devices, rings, strict=True)
    )
    return replace(model, config=config, parts=parts)


def joined_parts(model: Llama, parts: Sequence[Llama]) -> Llama:
    """`model` with these parts, which multiply otherwise, and with their layers and tables."""
    return replace(
        model,
        embed=parts[0].embed,
        layers=[layer for part in parts for layer in part.layers],
        norm=parts[-1].norm,
        lm_head=parts[-1].lm_head,
        parts=tuple(parts),
    )


def parted_rotary(model: Llama, far: bool) -> Rotary:
    """The rotations of a model, and of each of its parts on its device. far: as of Rotary."""
    whole = Rotary(model.config, model.device, far=far)
    whole.parts = tuple(Rotary(part.config, part.device, far=far) for part in model.parts)
    return whole


def to_parts(
    stream: Iterable[tuple[str, Any]],
    starts: Sequence[int],
    devices: Sequence[torch.device],
    tied: bool,
) -> Iterator[tuple[str, Any]]:
    """Bring each weight of a stream of (target name, tensor or Quantised) to its part's device:
    embeddings and what makes streams to the first, the last norm and the head to the last. An
    embedding in few bits that is the head as well comes a second time, behind it, unless the stream
    has a head.
    """
    for name, weight in stream:
        tied = tied and name != "lm_head"
        number = name.split(".")[0]
        device = devices[0] if name.startswith(FIRST) else devices[-1]
        if number.isdecimal():
            device = next(d for d, stop in zip(devices, starts[1:]) if int(number) < stop)
        yield name, weight.to(device)
        if name == "embed" and tied and isinstance(weight, Quantised):
            yield "lm_head", weight.to(devices[-1])
        del weight
