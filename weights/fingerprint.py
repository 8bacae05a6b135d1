"""Digests of a model folder: one of its shapes, which a calibration file carries, and one of its
weights.
"""

import hashlib
from pathlib import Path

from weights.checkpoint import Checkpoint
from weights.jsonfile import TOKENIZER_LIMIT, inside, present, read_bytes

SAMPLE = 4096  # bytes read at the start and in the middle of each tensor


def fingerprint(folder: str | Path) -> str:
    """Hash config.json and the sorted list of (tensor name, shape, stored dtype): sha256, hex.

    All models of one shape share it. Reads headers only. Raises what Checkpoint.open raises.
    """
    folder = Path(folder)
    tensors = Checkpoint.open(folder).tensors
    digest = hashlib.sha256(read_bytes(inside(folder, "config.json")))
    for name in sorted(tensors):
        info = tensors[name]
        digest.update(f"\n{name} {'x'.join(map(str, info.shape))} {info.dtype}".encode())
    return digest.hexdigest()


def weights_digest(folder: str | Path) -> str:
    """Hash what tells two trainings of one model apart: tokenizer.json, and SAMPLE bytes at the
    start and in the middle of every tensor; sha256, hex.

    Programs that resume from earlier answers of a model compare it. Raises what Checkpoint.open
    raises.
    """
    folder = Path(folder)
    digest, words = hashlib.sha256(), folder / "tokenizer.json"
    digest.update(read_bytes(words, TOKENIZER_LIMIT) if present(words) else b"")
    for _, info in sorted(Checkpoint.open(folder).tensors.items()):
        with open(info.file, "rb") as file:
            for start in (0, info.nbytes // 2):
                file.seek(info.start + start)
                digest.update(file.read(min(SAMPLE, info.nbytes - start)))
    return digest.hexdigest()
