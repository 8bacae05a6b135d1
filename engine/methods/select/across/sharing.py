"""Files of what HShare's layers and heads share: the JSON of tools/calibrate/sharing, which names
the model that it was made for, and the layers' tables that its authors publish.

Source: wuhuaijin/HShare, config/MODEL/sharing_layer_16.json: for every layer the layer whose choice
it reads, itself or one before.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.base.checks import found as shown
from engine.base.checks import is_integer
from engine.base.errors import SettingError
from engine.methods.tables.head_table import (
    FORMAT,
    MOST,
    Facts,
    Table,
    facts_of,
    require_folder,
    require_model,
    table_data,
    table_text,
)
from engine.model.config.config import ModelConfig
from weights.jsonfile import parse

Sources = tuple[int, ...]  # of a list of lists: for each the number of the one that is read

NAME = "hshare.json"
HOW = (
    "make it in a clone: python -m tools.calibrate.sharing --model FOLDER; or take the model's "
    "sharing_layer file from wuhuaijin/HShare"
)
SHARING = Table("sharing", HOW)
PUBLISHED = "layer.share_config"


def read_sharing(path: Path) -> tuple[Sources, tuple[Sources, ...] | None, Facts]:
    """The layers' sources of a file, its heads' (None where it has none), and the numbers of the
    model that it names. Raises SettingError where it is no such file, or lies beside another model.
    """
    text = table_text(path, SHARING)
    if PUBLISHED in text[:LOOKED_AT]:
        try:
            return checked_sources("layers", parse(text.encode()).get(PUBLISHED)), None, ()
        except (ValueError, RecursionError, AttributeError) as error:
            raise SettingError(
                f"sharing: {path}: not valid JSON: {shown(str(error))}; {HOW}"
            ) from None
    data, facts = table_data(path, text, SHARING)
    require_folder(path, data, SHARING)
    return checked_sources("layers", data.get("layers")), checked_heads(data.get("heads")), facts


LOOKED_AT = 200  # characters: a published file begins with its only key


def sharing_text(
    layers: Sources, heads: tuple[Sources, ...], config: ModelConfig, more: dict[str, Any]
) -> str:
    """A JSON text of what was found for a model, beside what else is to be known of it."""
    data = {"format": FORMAT, "model": dict(facts_of(config)), **more}
    return json.dumps(data | {"layers": layers, "heads": heads}) + "\n"


def checked_sources(name: str, table: Any) -> Sources:
    """Sources as a tuple. Raises SettingError where one is no number up to its own place, or reads
    another in its turn.
    """
    numbers = tuple(table) if isinstance(table, (list, tuple)) else ()
    if not 0 < len(numbers) <= MOST or not all(map(is_integer, numbers)):
        raise SettingError(
            f"{name}: found {shown(table)}, expected for each the number of the one whose list it "
            f"reads, such as (0, 1, 1, 3); {HOW}"
        )
    for place, source in enumerate(numbers):
        if not 0 <= source <= place or numbers[source] != source:
            raise SettingError(
                f"{name}: found {source} at place {place}, expected {place} itself or one before "
                "it that reads its own list"
            )
    return numbers


def checked_heads(table: Any) -> tuple[Sources, ...]:
    """The heads' sources [layer][K/V head]. Raises SettingError as `checked_sources`."""
    rows = table if isinstance(table, (list, tuple)) else ()
    if not 0 < len(rows) <= MOST:
        raise SettingError(
            f"heads: found {shown(table)}, expected for every layer a list of K/V heads; {HOW}"
        )
    found = tuple(checked_sources(f"heads of layer {i}", row) for i, row in enumerate(rows))
    for layer, row in enumerate(found):
        if len(row) != len(found[0]):
            raise SettingError(
                f"heads: found {len(row)} K/V heads in layer {layer} and {len(found[0])} in layer "
                "0, expected equally many"
            )
    return found


def require_layers(
    layers: Sources | None,
    heads: tuple[Sources, ...] | None,
    facts: Facts,
    config: ModelConfig,
) -> None:
    """Raise SettingError where the sources are another model's, or lead to a layer that sees no
    more than a window.
    """
    count, own = config.num_layers, heads or ((0,) * config.num_kv_heads,) * config.num_layers
    require_model(own, facts, config, SHARING)
    if layers is not None and len(layers) != count:
        raise SettingError(
            f"layers: found those of a model with {len(layers)} layers, expected {count}, as this "
            f"model has ({config.family}); {HOW}"
        )
    others = {*config.local_layers, *config.recurrent_layers}
    for layer, source in enumerate(layers or ()):
        if source in others and layer not in others:
            raise SettingError(
                f"layers: found {source} at place {layer}, a layer that does not see everything "
                f"({config.family}); {HOW}"
            )
