"""What makes a model folder itself: a digest that a calibration file carries, so that it is never used beside other weights' shapes."""

import hashlib
from pathlib import Path

from weights.checkpoint import Checkpoint


def fingerprint(folder: str | Path) -> str:
    """sha256 (hex) of config.json's bytes and the sorted list of (tensor name, shape, stored dtype). Reads headers only.

    Raises what Checkpoint.open raises for a damaged or missing checkpoint.
    """
    folder = Path(folder)
    tensors = Checkpoint.open(folder).tensors
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name in sorted(tensors):
        info = tensors[name]
        digest.update(f"\n{name} {'x'.join(map(str, info.shape))} {info.dtype}".encode())
    return digest.hexdigest()
