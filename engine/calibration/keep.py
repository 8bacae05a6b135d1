"""Where a calibration is kept: omnikv.json beside the model, or, where that folder cannot be
written, the user's cache.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from engine.base.errors import UsageError
from engine.base.version import VERSION
from engine.plan.filter_layers import FORMAT, NAME, weights_file
from weights.fingerprint import fingerprint, weights_digest


def calibration(
    folder: Path, filters: tuple[int, ...], k: int, maker: str = "engine.chat"
) -> dict[str, Any]:
    """Return the content of a calibration without wait layers, for these weights only."""
    return {
        "format": FORMAT,
        "fingerprint": fingerprint(folder),
        "weights": weights_digest(folder),
        "filter_layers": list(filters),
        "wait_layers": 0,
        "k": k,
        "scores": "softmax",
        "made_by": f"{maker} {VERSION}",
    }


def keep(folder: Path, data: dict[str, Any]) -> Path:
    """Write a calibration beside the model, else to the user's cache under the digest of the
    weights; returns the path. Raises UsageError where neither can be written.
    """
    failed: OSError | None = None
    # nothing lies beside the weights in a model that is one file
    beside = [] if folder.is_file() else [folder / NAME]
    for path in (*beside, weights_file(data["weights"])):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _replace(path, json.dumps(data, indent=1) + "\n")
            return path
        except OSError as error:
            failed = error
    raise UsageError(
        f"{folder}: the calibration cannot be kept: {failed}; expected a folder or a cache "
        "(XDG_CACHE_HOME) that can be written"
    )


def _replace(path: Path, text: str) -> None:
    """Write a file beside its place and rename it, so that a reader finds all of it or none."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name[:40]}.", suffix=".part", dir=path.parent)
    try:
        with open(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
