"""Digests of a model folder: one of its shapes, which a calibration file carries, and one of its
weights.
"""

import hashlib
from pathlib import Path

from weights.checkpoint import Checkpoint
from weights.gguf.header import GGUF, read_header
from weights.gguf.magic import is_gguf
from weights.jsonfile import TOKENIZER_LIMIT, inside, present, read_bytes

SAMPLE = 4096  # bytes read at the start and in the middle of each tensor


def fingerprint(folder: str | Path) -> str:
    """Hash config.json and the sorted list of (tensor name, shape, stored dtype): sha256, hex.

    All models of one shape share it. Reads headers only. Of a GGUF file its numbers take the place
    of config.json. Raises what Checkpoint.open raises.
    """
    folder = Path(folder)
    if is_gguf(folder):
        return _of_file(read_header(folder))
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
    if is_gguf(folder):
        return _samples(folder)
    digest, words = hashlib.sha256(), folder / "tokenizer.json"
    digest.update(read_bytes(words, TOKENIZER_LIMIT) if present(words) else b"")
    for _, info in sorted(Checkpoint.open(folder).tensors.items()):
        with open(info.file, "rb") as file:
            for start in (0, info.nbytes // 2):
                file.seek(info.start + start)
                digest.update(file.read(min(SAMPLE, info.nbytes - start)))
    return digest.hexdigest()


def _of_file(file: GGUF) -> str:
    """The fingerprint of a GGUF file: its numbers and texts, but for the chat template, and the
    names, shapes and types of its tensors.
    """
    digest = hashlib.sha256()
    for name, value in sorted(file.keys.items()):
        if isinstance(value, (int, float, str)) and not name.endswith("chat_template"):
            digest.update(f"\n{name}={value}".encode())
    for name, tensor in sorted(file.tensors.items()):
        digest.update(f"\n{name} {'x'.join(map(str, tensor.shape))} {tensor.kind}".encode())
    return digest.hexdigest()


def _samples(path: Path) -> str:
    """SAMPLE bytes at the start and in the middle of every tensor of a GGUF file, and its words."""
    file, digest = read_header(path), hashlib.sha256()
    for word in file.keys.get("tokenizer.ggml.tokens") or ():
        digest.update(f"\n{word}".encode())
    with open(path, "rb") as raw:
        for _, tensor in sorted(file.tensors.items()):
            for start in (0, tensor.nbytes // 2):
                raw.seek(tensor.start + start)
                digest.update(raw.read(min(SAMPLE, tensor.nbytes - start)))
    return digest.hexdigest()
