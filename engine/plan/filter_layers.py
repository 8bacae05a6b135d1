"""Which filter layers a model has: from omnikv.json beside it or in the user's cache, the published
table, else a stated spread.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from engine.errors import BadCheckpoint, EngineError
from engine.plan.layers import PAPER_WAIT, spread_filter_layers
from weights.aliases import ALIASES
from weights.fingerprint import fingerprint

FORMAT = 1
NAME = "omnikv.json"


@dataclass(frozen=True)
class Known:
    """Filter layers and where they come from: "file", "published" or "spread"; `hint` is one line
    for people, may be empty.
    """

    layers: tuple[int, ...]
    source: str
    hint: str = ""
    wait: int = PAPER_WAIT  # layers after a filter that attend to everything


def cache_file(digest):
    """Where a calibration of a model folder that cannot be written is kept: ~/.cache/omnikv (or
    XDG_CACHE_HOME), by fingerprint.
    """
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "omnikv"
        / f"{digest}.json"
    )


def filter_layers(folder, resolved, config):
    """The Known filter layers of a model. folder: Path or None; resolved: weights.resolve.Resolved
    or None.

    A calibration made for other weights is ignored with a hint; a damaged one raises BadCheckpoint.
    """
    digest, hint = _digest(folder), ""
    for path in ([Path(folder) / NAME] if folder is not None else []) + (
        [cache_file(digest)] if digest else []
    ):
        if path.is_file():
            found = read(path, config)
            if digest is None or found["fingerprint"] in (None, digest):
                return Known(tuple(found["filter_layers"]), "file", wait=found["wait_layers"])
            hint = (
                f"{path}: ignored, it was made for other weights (fingerprint {found['fingerprint'][:12]}, "
                f"this model is {digest[:12]}); calibrate again"
            )
    for alias in ALIASES.values():
        if alias.filter_layers and resolved is not None and resolved.hub_id == alias.hub_id:
            return Known(tuple(alias.filter_layers), "published", hint)
    layers = spread_filter_layers(config.num_layers)
    return Known(
        layers,
        "spread",
        hint
        or f"hint: nobody has calibrated this model; filter layers {layers} are a guess spread over the "
        f"depth (python -m tools.calibrate finds its own)",
    )


def _digest(folder):
    """The model's fingerprint, or None where its tensors are not there (a plan from config.json
    alone).
    """
    try:
        return fingerprint(folder) if folder is not None else None
    except (EngineError, OSError):
        return None


def read(path, config):
    """The fields of a calibration file, checked. Raises BadCheckpoint naming file, field, found and
    expected.
    """
    try:
        data = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BadCheckpoint(
            f"{path}: found no readable JSON ({error}), expected a calibration; delete it or calibrate again"
        ) from error

    def refuse(field, expected):
        value = data.get(field) if isinstance(data, dict) else data
        raise BadCheckpoint(
            f"{path}: {field}: found {str(value)[:60]!r}, expected {expected}; delete it or calibrate again"
        )

    if not isinstance(data, dict) or data.get("format") != FORMAT:
        refuse("format", FORMAT)
    layers = data.get("filter_layers")
    whole = (
        isinstance(layers, list)
        and layers
        and all(isinstance(x, int) and not isinstance(x, bool) for x in layers)
    )
    if (
        not whole
        or not 0 <= layers[0]
        or layers[-1] >= config.num_layers
        or any(a >= b for a, b in zip(layers, layers[1:]))
    ):
        refuse("filter_layers", f"ascending numbers below {config.num_layers}")
    wait = data.setdefault("wait_layers", PAPER_WAIT)
    if isinstance(wait, bool) or not isinstance(wait, int) or wait < 0:
        refuse("wait_layers", "an int >= 0")
    digest = data.setdefault("fingerprint", None)
    if digest is not None and (not isinstance(digest, str) or len(digest) != 64):
        refuse("fingerprint", "64 hexadecimal digits")
    return data
