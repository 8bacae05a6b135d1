"""From a GGUF file to a Hugging Face folder, one tensor in memory at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.load.gguf.config import architecture, checkpoint, read_config
from engine.load.gguf.vocabulary import Vocabulary, read_vocabulary
from engine.model.config.config import ModelConfig
from engine.model.config.fields import Fields
from engine.model.config.rope_config import MAX_POSITIONS
from engine.model.tensors import targets
from kernels.quant.matrix import Quantised, blocks
from tools.convert.folder import (
    require_room,
    same_conversion,
    sha256,
    whole_or_absent,
    write_record,
)
from weights.gguf.checkpoint import GGUFCheckpoint
from weights.gguf.header import GGUF, read_header
from weights.quantised.stored import Stored

DTYPES = {"bfloat16": ("BF16", torch.bfloat16), "float32": ("F32", torch.float32)}
OTHER_FILES = 32 << 20  # bytes; tokenizer.json of the largest vocabularies takes 18 MB
CONTEXT = "llama.context_length"
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Description:
    """What a file becomes: config.json, its checked form, the vocabulary, the tensors."""

    file: GGUF
    config: dict[str, Any]
    parsed: ModelConfig
    vocabulary: Vocabulary
    tensors: GGUFCheckpoint


def describe(source: Path, dtype: str) -> Description:
    """Read and check everything of a file but its weights. Raises EngineError, in one line."""
    file = read_header(source)
    fields = Fields(file.keys, str(source))
    architecture(fields, ("llama",))
    context = fields.integer(CONTEXT, 1, MAX_POSITIONS)
    vocabulary = read_vocabulary(file.keys, str(source), context)
    config, parsed = read_config(file, vocabulary, dtype)
    return Description(file, config, parsed, vocabulary, checkpoint(file, parsed))


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
        write_tensors(found, beside / "model.safetensors", dtype, report)
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


def write_tensors(found: Description, path: Path, dtype: str, report: Report | None) -> None:
    """Write a safetensors file. Its own library wants all tensors in memory at once; the format is
    a u64 length, a JSON header and the bytes.
    """
    name, kind = DTYPES[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    wanted = [part for target in targets(found.parsed) for part in target.parts]
    at = done = 0
    for one, shape in wanted:
        end = at + torch.Size(shape).numel() * kind.itemsize
        header[one] = {"dtype": name, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    total = at // kind.itemsize
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for one, _ in wanted:
            for piece in decoded(found.tensors, one):
                out.write(piece.to(kind).view(torch.uint8).numpy().tobytes())
                done += piece.numel()
                if report:
                    report(done, total)


def decoded(tensors: GGUFCheckpoint, name: str) -> Iterator[torch.Tensor]:
    """A tensor's elements as float32, some rows at a time, in Hugging Face's order of rows.

    Raises BadCheckpoint for NaN and infinity.
    """
    found = tensors.read(name, "cpu", torch.float32)
    if not isinstance(found, Stored):
        yield found.reshape(-1)
        return
    matrix = Quantised(*found)
    for part in blocks(matrix.shape):
        yield matrix.rows(part, torch.float32).reshape(-1)
