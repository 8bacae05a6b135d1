"""The configuration of a part of a model's layers, numbered from 0."""

from __future__ import annotations

from dataclasses import replace

from engine.model.config.config import ModelConfig


def part_of(config: ModelConfig, first: int, stop: int) -> ModelConfig:
    """The configuration of the layers first .. stop-1: with the embeddings where they are the
    first, with the head where they are the last. A tied head is a table of its own there. A layer
    whose rows another part has is one that reads, for those who count weights: no part has one.
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
        row_layers=tuple(max(-1, rows - first) for rows in config.row_layers[first:stop]),
        experts=experts,
        recurrent=recurrent,
        names=replace(names, halves=names.halves[first:stop]),
        block=replace(block, cuts=block.cuts[first:stop]),
        bare=tuple(layer - first for layer in config.bare if first <= layer < stop),
        tied_embeddings=False,
        ends=(first == 0, stop == config.num_layers),
        behind=config.num_layers - stop,
    )
