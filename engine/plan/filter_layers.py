"""Which filter layers a model has.

They come from omnikv.json beside the model or in the user's cache (written by tools.calibrate),
else from the published table, else from a spread over the depth that says that it is a guess.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine.errors import BadCheckpoint, EngineError
from engine.plan.layers import PAPER_WAIT, spread_over
from engine.settings import is_integer
from weights.aliases import ALIASES
from weights.fingerprint import fingerprint
from weights.jsonfile import inside, present, read_json, shown

if TYPE_CHECKING:
    from engine.model.config import ModelConfig
    from weights.resolve import Resolved

FORMAT = 1
NAME = "omnikv.json"
LIMIT = 1 << 20  # bytes; one of 100 layers with every figure of its search has 50 KB
DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class FilterLayers:
    """Filter layers and their source: "file", "published" or "spread".

    hint: one line for people, possibly empty. wait: layers after a filter that attend to
    everything; a published set was published with one.
    """

    layers: tuple[int, ...]
    source: str
    hint: str = ""
    wait: int = 0


def cache_file(digest: str) -> Path:
    """Return where the calibration of a model folder that cannot be written is kept.

    It is below ~/.cache/omnikv (or XDG_CACHE_HOME), named by the model's fingerprint.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "omnikv" / f"{digest}.json"


def filter_layers(
    folder: str | Path | None, resolved: Resolved | None, config: ModelConfig
) -> FilterLayers:
    """Find a model's filter layers. folder, resolved: None for a model that is in no folder.

    A calibration made for other weights is ignored with a hint; a damaged one raises BadCheckpoint.
    """
    digest, hint = _digest(folder), ""
    for path in _candidates(folder, digest):
        if present(path):
            found = read(path, config)
            if digest is None or found["fingerprint"] in (None, digest):
                return FilterLayers(
                    tuple(found["filter_layers"]), "file", wait=found["wait_layers"]
                )
            hint = (
                f"{path}: ignored, it was made for other weights (fingerprint "
                f"{found['fingerprint'][:12]}, this model is {digest[:12]}); calibrate again"
            )
    for alias in ALIASES.values():
        if alias.filter_layers and resolved is not None and resolved.hub_id == alias.hub_id:
            return FilterLayers(tuple(alias.filter_layers), "published", hint, wait=PAPER_WAIT)
    layers = spread_over(config.num_layers, config.local_layers)
    guess = (
        f"hint: nobody has calibrated this model; filter layers {layers} are a guess spread over "
        "the depth (python -m tools.calibrate finds its own)"
    )
    return FilterLayers(layers, "spread", hint or guess)


def _candidates(folder: str | Path | None, digest: str | None) -> list[Path]:
    """Return where a calibration may be, in order."""
    # nothing lies in a model that is one file
    beside = [] if folder is None or Path(folder).is_file() else [Path(folder) / NAME]
    return beside + ([] if digest is None else [cache_file(digest)])


def _digest(folder: str | Path | None) -> str | None:
    """Return the model's fingerprint; None without its tensors (a plan from config.json alone)."""
    try:
        return None if folder is None else fingerprint(Path(folder))
    except (EngineError, OSError):
        return None


def read(path: str | Path, config: ModelConfig) -> dict[str, Any]:
    """Return the checked fields of a calibration file.

    Raises BadCheckpoint, which names file, field, found and expected.
    """
    path = Path(path)
    try:
        data = read_json(inside(path.parent, path.name) if path.name == NAME else path, LIMIT)
    except BadCheckpoint as error:
        reason = str(error).removeprefix(f"{path}: ")
        raise BadCheckpoint(
            f"{path}: found no readable JSON ({reason}), expected a calibration; "
            "delete it or calibrate again"
        ) from error

    def refuse(field: str, expected: object) -> NoReturn:
        value = data.get(field) if isinstance(data, dict) else data
        raise BadCheckpoint(
            f"{path}: {field}: found {shown(value)}, expected {expected}; "
            "delete it or calibrate again"
        )

    if (
        not isinstance(data, dict)
        or type(found := data.get("format")) is not int
        or found != FORMAT
    ):
        refuse("format", FORMAT)
    if not _ascending(data.get("filter_layers"), config.num_layers):
        refuse("filter_layers", f"ascending numbers below {config.num_layers}")
    wait = data.setdefault("wait_layers", 0)
    if not is_integer(wait) or wait < 0:
        refuse("wait_layers", "an int >= 0")
    digest = data.setdefault("fingerprint", None)
    if digest is not None and (not isinstance(digest, str) or not DIGEST.fullmatch(digest)):
        refuse("fingerprint", "64 hexadecimal digits")
    return data


def _ascending(layers: object, below: int) -> bool:
    """Say whether `layers` is a list of ascending layer numbers, at least one, all < `below`."""
    if not isinstance(layers, list) or not layers:
        return False
    if not all(is_integer(layer) for layer in layers):
        return False
    ascending = all(a < b for a, b in zip(layers, layers[1:]))
    return ascending and layers[0] >= 0 and layers[-1] < below
