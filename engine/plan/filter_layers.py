"""Which filter layers a model has.

They come from omnikv.json beside the model or in the user's cache (written by tools.calibrate),
else from the table of what was found here or published (weights/published_filters.py), else from a
spread over the depth that says that it is a guess.
"""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from engine.base.checks import is_integer
from engine.base.errors import BadCheckpoint, EngineError
from engine.model.config.config import ModelConfig
from engine.plan.layers import spread_over
from weights.fingerprint import fingerprint, weights_digest
from weights.jsonfile import inside, present, read_json, shown
from weights.published_filters import FOUND, PUBLISHED, PublishedFilters
from weights.resolve import Resolved

FORMAT = 1
NAME = "omnikv.json"
LIMIT = 1 << 20  # bytes; one of 100 layers with every figure of its search has 50 KB


FINDERS = (
    "python -m engine.chat --calibrate -f FILE while it reads, or by python -m tools.calibrate"
)
UNCALIBRATED = (
    "OmniKV is off: this model is uncalibrated, so it runs full attention; its filter layers "
    f"are found by {FINDERS}"
)
LONG = 4096  # tokens of a prompt from which filter layers are worth a hint
DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class FilterLayers:
    """Filter layers and their source: "file", "found", "published" or "spread".

    hint: one line for people, possibly empty. wait: layers after a filter that attend to
    everything; a published set was published with one.
    """

    layers: tuple[int, ...]
    source: str
    hint: str = ""
    wait: int = 0


def hint_at(hint: str, tokens: int) -> None:
    """Warn a program that reads a long prompt with an uncalibrated model."""
    if hint == UNCALIBRATED and tokens >= LONG:
        warnings.warn(hint, stacklevel=4)


def cache_file(digest: str) -> Path:
    """Return the path of the calibration of a model folder that cannot be written.

    It is below ~/.cache/omnikv (or XDG_CACHE_HOME), named by the model's fingerprint.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "omnikv" / f"{digest}.json"


def weights_file(digest: str) -> Path:
    """Return the path of the calibration of these very weights, by their digest."""
    return cache_file(f"weights-{digest}")


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
            other = _other_weights(found, folder, digest)
            if not other:
                layers = tuple(found["filter_layers"])
                return FilterLayers(
                    layers, "file", f"filter layers {layers}: from {path}", found["wait_layers"]
                )
            hint = f"{path}: ignored, it was made for other weights ({other}); calibrate again"
    if (listed := _listed(folder, resolved, digest)) is not None:
        said = f"filter layers {listed.layers}: {listed.told}"
        if not listed.found_here:
            said += "; --calibrate finds the model's own while it reads a document"
        source = "found" if listed.found_here else "published"
        return FilterLayers(listed.layers, source, hint or said, listed.wait)
    layers = spread_over(config.num_layers, config.other_layers)
    guess = (
        f"hint: this model is uncalibrated; filter layers {layers} are a guess spread over "
        f"the depth (its own are found by {FINDERS})"
    )
    return FilterLayers(layers, "spread", hint or guess)


def _listed(
    folder: str | Path | None, resolved: Resolved | None, digest: str | None
) -> PublishedFilters | None:
    """Return the published filters of these weights, or of the model of that name on the hub."""
    if folder is not None and digest in FOUND:
        try:
            if (found := FOUND[digest].get(weights_digest(folder))) is not None:
                return found
        except (EngineError, OSError):
            pass
    hub_id = resolved.hub_id if resolved is not None else None
    return PUBLISHED.get(hub_id) if hub_id else None


def _candidates(folder: str | Path | None, digest: str | None) -> list[Path]:
    """Return the paths of a possible calibration, in order."""
    # nothing lies in a model that is one file
    found = [] if folder is None or Path(folder).is_file() else [Path(folder) / NAME]
    if folder is None or digest is None:
        return found
    found.append(cache_file(digest))
    try:
        # the digest of the weights costs two reads a tensor, which few need
        if any(cache_file(digest).parent.glob("weights-*.json")):
            found.append(weights_file(weights_digest(folder)))
    except (EngineError, OSError):
        pass
    return found


def _other_weights(found: dict[str, Any], folder: str | Path | None, digest: str | None) -> str:
    """Return a note on the weights that a calibration was made for; "" if they are this model's."""
    if folder is None or digest is None:
        return ""
    if found["fingerprint"] not in (None, digest):
        return f"fingerprint {found['fingerprint'][:12]}, this model is {digest[:12]}"
    try:
        mine = weights_digest(folder) if found["weights"] else None
    except (EngineError, OSError):
        return ""
    if found["weights"] != mine:
        return f"digest {found['weights'][:12]}, this model's is {str(mine)[:12]}"
    return ""


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
    for field in ("fingerprint", "weights"):
        digest = data.setdefault(field, None)
        if digest is not None and (not isinstance(digest, str) or not DIGEST.fullmatch(digest)):
            refuse(field, "64 hexadecimal digits")
    return data


def _ascending(layers: object, below: int) -> bool:
    """Say whether `layers` is a list of ascending layer numbers, at least one, all < `below`."""
    if not isinstance(layers, list) or not layers:
        return False
    if not all(is_integer(layer) for layer in layers):
        return False
    ascending = all(a < b for a, b in zip(layers, layers[1:]))
    return ascending and layers[0] >= 0 and layers[-1] < below
