"""From a GGUF file to a Hugging Face folder, one tensor in memory at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from engine.errors import BadCheckpoint
from engine.model.config import ModelConfig
from engine.model.fields import Fields
from engine.model.rope_config import MAX_POSITIONS
from tools.gguf.folder import (
    require_room,
    same_conversion,
    sha256,
    whole_or_absent,
    write_record,
)
from tools.gguf.header import GGUF, StoredTensor, library, read_header
from tools.gguf.llama import Wanted, read_config, require_llama, wanted_tensors
from tools.gguf.vocabulary import Vocabulary, read_vocabulary

DTYPES = {"bfloat16": ("BF16", torch.bfloat16), "float32": ("F32", torch.float32)}
PIECE = 1 << 22  # elements that are decoded at a time
OTHER_FILES = 32 << 20  # bytes; tokenizer.json of the largest vocabularies takes 18 MB
CONTEXT = "llama.context_length"
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Description:
    """What a file becomes: config.json, its checked form, the vocabulary, the tensors in order."""

    file: GGUF
    config: dict[str, Any]
    parsed: ModelConfig
    vocabulary: Vocabulary
    wanted: list[Wanted]


def describe(source: Path, dtype: str) -> Description:
    """Read and check everything of a file but its weights. Raises EngineError, in one line."""
    library()
    file = read_header(source)
    fields = Fields(file.keys, str(source))
    require_llama(fields)
    context = fields.integer(CONTEXT, 1, MAX_POSITIONS)
    vocabulary = read_vocabulary(file.keys, str(source), context)
    config, parsed = read_config(file, vocabulary, dtype)
    return Description(file, config, parsed, vocabulary, wanted_tensors(file, parsed))


def convert(
    source: Path, folder: Path, dtype: str = "bfloat16", report: Report | None = None
) -> bool:
    """Convert a GGUF file of a plain Llama to a Hugging Face folder.

    dtype: "bfloat16" or "float32", what model.safetensors stores. report(done, total): elements.
    Returns False if the folder already is this conversion. Raises EngineError, in one line, for a
    file that is damaged or of another kind, a folder that is something else, and a full disk;
    nothing is left behind then.
    """
    found = describe(source, dtype)
    digest = sha256(source)
    if same_conversion(folder, digest, dtype):
        return False
    width = DTYPES[dtype][1].itemsize
    require_room(folder, found.parsed.parameters * width + OTHER_FILES)
    generation = {name: found.config[name] for name in ("bos_token_id", "eos_token_id")}
    with whole_or_absent(folder) as beside:
        write_tensors(found.file, found.wanted, beside / "model.safetensors", dtype, report)
        for name, content in (
            ("config.json", found.config),
            ("generation_config.json", generation),
            ("tokenizer_config.json", found.vocabulary.settings),
        ):
            known = {key: value for key, value in content.items() if value is not None}
            (beside / name).write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        found.vocabulary.tokenizer.save(str(beside / "tokenizer.json"))
        write_record(beside, digest, dtype)
    return True


def write_tensors(
    file: GGUF, wanted: list[Wanted], path: Path, dtype: str, report: Report | None
) -> None:
    """Write a safetensors file. Its own library wants all tensors in memory at once; the format is
    a u64 length, a JSON header and the bytes.
    """
    name, kind = DTYPES[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = done = 0
    for one in wanted:
        end = at + one.stored.elements * kind.itemsize
        header[one.name] = {
            "dtype": name,
            "shape": list(one.stored.shape),
            "data_offsets": [at, end],
        }
        at = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    total = sum(one.stored.elements for one in wanted)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for one in wanted:
            for piece in decoded(file, one):
                _write(out, piece.to(kind), file, one.stored)
                done += piece.numel()
                if report:
                    report(done, total)


def _write(out: BinaryIO, piece: torch.Tensor, file: GGUF, stored: StoredTensor) -> None:
    """Write a piece's bytes. Raises BadCheckpoint for NaN and infinity."""
    if not bool(torch.isfinite(piece).all()):
        raise BadCheckpoint(
            f"{file.path}: tensor {stored.name}: found NaN or infinity, expected finite weights"
        )
    out.write(piece.view(torch.uint8).numpy().tobytes())


def decoded(file: GGUF, wanted: Wanted) -> Iterator[torch.Tensor]:
    """A tensor's elements as float32, some rows at a time, in Hugging Face's order of rows."""
    gguf, stored = library(), wanted.stored
    raw = np.frombuffer(file.raw(stored), dtype=np.uint8).reshape(stored.rows, -1)
    if wanted.heads:
        raw = halves(raw, wanted.heads)
    kind = gguf.GGMLQuantizationType[stored.kind]
    step = max(1, PIECE // stored.shape[-1])
    for start in range(0, stored.rows, step):
        rows = np.ascontiguousarray(raw[start : start + step])
        with np.errstate(all="ignore"):  # an infinite scale is refused where it is written
            values = gguf.quants.dequantize(rows, kind)
        yield torch.from_numpy(np.array(values, dtype=np.float32)).reshape(-1)


def halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * head_dim, ...] whose halves of each head are interleaved -> half after half."""
    width = rows.shape[0] // heads // 2
    apart = rows.reshape(heads, width, 2, *rows.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(apart).reshape(rows.shape)
