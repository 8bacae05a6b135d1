"""What makes a model folder itself: a digest that a calibration file carries, so that it is never
used beside other weights' shapes.
"""

import hashlib
from pathlib import Path

from weights.checkpoint import Checkpoint

SAMPLE = 4096


def fingerprint(folder: str | Path) -> str:
    """sha256 (hex) of config.json's bytes and the sorted list of (tensor name, shape, stored
    dtype). Reads headers only.

    Raises what Checkpoint.open raises for a damaged or missing checkpoint.
    """
    folder = Path(folder)
    tensors = Checkpoint.open(folder).tensors
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name in sorted(tensors):
        info = tensors[name]
        digest.update(f"\n{name} {'x'.join(map(str, info.shape))} {info.dtype}".encode())
    return digest.hexdigest()


def weights_digest(folder: str | Path) -> str:
    """sha256 (hex) of what tells two trainings of one model apart: tokenizer.json, and the first
    and middle SAMPLE bytes of every tensor.

    For programs that go on with answers a model gave earlier; `fingerprint` is the same for all
    models of one shape. Raises what Checkpoint.open raises.
    """
    folder = Path(folder)
    digest, words = hashlib.sha256(), folder / "tokenizer.json"
    digest.update(words.read_bytes() if words.is_file() else b"")
    for _, info in sorted(Checkpoint.open(folder).tensors.items()):
        with open(info.file, "rb") as file:
            for start in (0, info.nbytes // 2):
                file.seek(info.start + start)
                digest.update(file.read(min(SAMPLE, info.nbytes - start)))
    return digest.hexdigest()
