"""Which filter layers a model has: from omnikv.json beside it, from the published table, else a stated spread over the depth."""

import json
from dataclasses import dataclass
from pathlib import Path

from engine.errors import BadCheckpoint
from engine.plan import spread_filter_layers
from weights.aliases import ALIASES

FORMAT = 1


@dataclass(frozen=True)
class Known:
    """Filter layers and where they come from: "file", "published" or "spread"; `hint` is one line for people, may be empty."""

    layers: tuple[int, ...]
    source: str
    hint: str = ""


def filter_layers(folder, resolved, config):
    """The Known filter layers of a model. folder: Path or None; resolved: weights.resolve.Resolved or None."""
    if folder is not None and (Path(folder) / "omnikv.json").is_file():
        return Known(_from_file(Path(folder) / "omnikv.json", config), "file")
    for alias in ALIASES.values():
        named = resolved is not None and resolved.hub_id == alias.hub_id
        if alias.filter_layers and named:
            return Known(tuple(alias.filter_layers), "published")
    layers = spread_filter_layers(config.num_layers)
    return Known(layers, "spread", f"hint: nobody has calibrated this model; filter layers {layers} are a guess spread over the depth")


def _from_file(path, config):
    try:
        data = json.loads(path.read_text())
        layers = tuple(data["filter_layers"])
        sound = data["format"] == FORMAT and layers and all(isinstance(x, int) and 0 <= x < config.num_layers for x in layers) \
            and all(a < b for a, b in zip(layers, layers[1:]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadCheckpoint(f"{path}: found {error}, expected the calibration file's fields; delete it or calibrate again") from error
    if not sound:
        raise BadCheckpoint(f"{path}: found format {data.get('format')!r} and filter_layers {data.get('filter_layers')!r}, expected "
                            f"format {FORMAT} and ascending numbers below {config.num_layers}; delete it or calibrate again")
    return layers
