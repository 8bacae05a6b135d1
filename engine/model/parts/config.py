"""The configuration of a part of a model's layers, numbered from 0."""

from __future__ import annotations

from dataclasses import replace

from engine.base.errors import SettingError
from engine.model.config.config import ModelConfig


def require_parts(config: ModelConfig) -> None:
    """Raise SettingError for a model whose layers pass more from one to the next than a hidden
    vector.
    """
    block = config.block
    for has, what in (
        (bool(config.row_layers), "layers that read the rows of others"),
        (bool(block.per_layer or block.streams), "embeddings that go to every layer"),
    ):
        if has:
            raise SettingError(
                f"devices: found several for {config.family}, which has {what}; use one device"
            )


def part_of(config: ModelConfig, first: int, stop: int) -> ModelConfig:
    """The configuration of the layers first .. stop-1: with the embedding where they are the first,
    with the head where they are the last. A tied head is a table of its own there.
    """
    experts, block, windows = config.experts, config.block, config.windows[first:stop]
    recurrent, names = config.recurrent, config.names
    if recurrent is not None:
        layers = tuple(layer - first for layer in recurrent.layers if first <= layer < stop)
        recurrent = replace(recurrent, layers=layers) if layers else None
    if experts is not None:
        dense = tuple(layer - first for layer in experts.dense if first <= layer < stop)
        experts = replace(experts, dense=dense)
    return replace(
        config,
        num_layers=stop - first,
        windows=windows,
        local_heads=config.local_heads if any(windows) else None,
        layer_ropes=config.layer_ropes[first:stop],
        experts=experts,
        recurrent=recurrent,
        names=replace(names, halves=names.halves[first:stop]),
        block=replace(block, cuts=block.cuts[first:stop]),
        bare=tuple(layer - first for layer in config.bare if first <= layer < stop),
        tied_embeddings=False,
        ends=(first == 0, stop == config.num_layers),
    )
