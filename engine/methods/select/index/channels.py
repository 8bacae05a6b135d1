"""Files of Double Sparsity's heavy channels: the JSON of tools/studies/heavy_channels.py, which
names the model that it was made for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.base.checks import found, is_integer
from engine.base.errors import SettingError
from engine.methods.tables.head_table import (
    FORMAT,
    MOST,
    Facts,
    Table,
    facts_of,
    require_model,
    table_data,
    table_text,
)
from engine.model.config.config import ModelConfig

Channels = tuple[tuple[tuple[int, ...], ...], ...]  # [layer][K/V head]: channels, heaviest first

HOW = "make them in a clone: python -m tools.studies.heavy_channels --model FOLDER"
CHANNELS = Table("channels", HOW)


def read_channels(path: Path) -> tuple[Channels, Facts]:
    """The channels of a file, and the numbers of the model that it names. Raises SettingError where
    it is no such file.
    """
    data, facts = table_data(path, table_text(path, CHANNELS), CHANNELS)
    return checked_channels(data.get("channels")), facts


def channels_text(channels: Channels, config: ModelConfig, more: dict[str, Any]) -> str:
    """A JSON text of channels that were found for a model, a layer to a line, beside what else is
    to be known.
    """
    head = json.dumps({"format": FORMAT, "model": dict(facts_of(config)), **more}, indent=1)
    layers = ",\n".join(f"  {json.dumps(layer)}" for layer in channels)
    return f'{head[:-2]},\n "channels": [\n{layers}\n ]\n}}\n'


def checked_channels(channels: Any) -> Channels:
    """Lists of channels as tuples. Raises SettingError where they are no such table of distinct
    numbers, equally many for every head.
    """
    rows = channels if isinstance(channels, (list, tuple)) else ()
    kinds = (list, tuple)
    if not 0 < len(rows) <= MOST or not all(isinstance(row, kinds) and row for row in rows):
        raise SettingError(
            f"channels: found {found(channels)}, expected a table [layer][K/V head] of lists of "
            "channels, the heaviest first, or a file that holds one"
        )
    if len(set(map(len, rows))) > 1:
        counts = ", ".join(map(str, sorted(set(map(len, rows)))))
        raise SettingError(f"channels: found layers of {counts} K/V heads, expected equally many")
    heads = [(i, j, head) for i, row in enumerate(rows) for j, head in enumerate(row)]
    for layer, number, head in heads:
        good = isinstance(head, kinds) and 0 < len(head) <= MOST and all(map(is_integer, head))
        if not good or len(set(head)) < len(head) or min(head) < 0:
            raise SettingError(
                f"channels: found {found(head)} for layer {layer}, K/V head {number}, expected "
                "distinct numbers of channels, from 0"
            )
        if len(head) != len(heads[0][2]):
            raise SettingError(
                f"channels: found {len(head)} for layer {layer}, K/V head {number} and "
                f"{len(heads[0][2])} for the first, expected equally many"
            )
    return tuple(tuple(tuple(head) for head in row) for row in rows)


def require_channels(channels: Channels, facts: Facts, count: int, config: ModelConfig) -> None:
    """Raise SettingError where channels are another model's, or fewer than `count`."""
    require_model(channels, facts, config, CHANNELS)
    most, listed = max(max(head) for row in channels for head in row), len(channels[0][0])
    if most >= config.head_dim:
        raise SettingError(
            f"channels: found channel {most}, expected numbers below {config.head_dim}, the head "
            f"dimension of this model ({config.family}); {HOW}"
        )
    if listed < count:
        raise SettingError(
            f"channels: found {listed} for each K/V head, expected at least {count} (count); {HOW}"
        )
