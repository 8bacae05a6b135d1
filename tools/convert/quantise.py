"""A folder in few bits.

MODEL is a folder of float weights. OUT gets the same model in the compressed-tensors layout
("pack-quantized"), which this engine and other programs read: matrices of layers in 4 or 8 bits,
everything else as it was. One tensor is in memory at a time. The relative error of every matrix is
printed; OUT is whole or absent.
"""

from __future__ import annotations

import json
import shutil
import struct
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine.base.errors import UsageError
from engine.model.config.config import ModelConfig
from engine.model.tensors import ignored, targets
from kernels.quant.matrix import blocks
from kernels.quant.rounding import LEVELS, SHARES, to_int8
from tools.common import page
from tools.common.arguments import command
from tools.common.program import guarded, progress, say
from tools.convert.folder import require_room, whole_or_absent
from weights.checkpoint import DTYPES, Checkpoint, Target
from weights.jsonfile import inside, present, read_object
from weights.resolve import PATTERNS, resolve

GROUPS = {"int8": None, "int4": 32}  # columns under one scale, unless said otherwise
OTHER_FILES = 64 << 20  # bytes; tokenizer.json and its companions
LEAST = 1e-30  # a scale that can be divided by
Report = Callable[[int, int], None]


def packed_words(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 [R, C] of values below 2^bits to int32 words of a row, low bits first."""
    per = 32 // bits
    values = torch.nn.functional.pad(values, (0, -values.shape[1] % per))
    out = torch.zeros(values.shape[0], values.shape[1] // per, dtype=torch.int32)
    for place in range(per):
        out |= values[:, place::per].int() << (bits * place)
    return out


def quantised(
    weight: torch.Tensor, word: str, group: int | None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """({what follows the matrix's name: tensor}, the matrix that they mean in float32).

    weight: float [O, I]. Scales are bfloat16; int4 has integer zero points.
    """
    rows, columns = weight.shape
    size = columns if group is None else group
    if word == "int8":
        scales = to_int8(weight, group).scales.to(torch.bfloat16)
        zeros = torch.full(scales.shape, 128.0)
        bits = 8
    else:
        scales, zeros = fitted(weight, size)
        bits = 4
    values = torch.empty(rows, columns, dtype=torch.uint8)
    meant = torch.empty(rows, columns)
    for part in blocks(weight.shape):
        wide = weight[part].float().view(-1, columns // size, size)
        scale, zero = scales[part].float()[..., None], zeros[part][..., None]
        whole = (wide / scale + zero).round_().clamp_(0, (1 << bits) - 1)
        values[part] = whole.view(-1, columns).to(torch.uint8)
        meant[part] = ((whole - zero) * scale).view(-1, columns)
    stored = {
        "weight_packed": packed_words(values, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if word == "int4":
        zero_words = packed_words(zeros.to(torch.uint8).t().contiguous(), bits)
        stored["weight_zero_point"] = zero_words.t().contiguous()
    return stored, meant


def fitted(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(bfloat16 scales, whole zero points 0 to 15 as float32) [O, I / group] of 4 bits.

    A zero point is a level, so every range includes zero. As in kernels/quant/rounding.py the range
    and narrower ones are tried, each scale is refitted by least squares, and the least error wins.
    """
    scales = torch.empty(weight.shape[0], weight.shape[1] // group, dtype=torch.bfloat16)
    zeros = torch.empty(scales.shape)
    for part in blocks(weight.shape):
        wide = weight[part].float().view(-1, scales.shape[1], group)
        low, high = wide.amin(-1).clamp(max=0), wide.amax(-1).clamp(min=0)
        best = torch.full(low.shape, float("inf"))
        for share in SHARES:
            scale = (share * (high - low) / LEVELS).clamp_min(LEAST)
            zero = (-share * low / scale).round().clamp(0, LEVELS)
            steps = _steps(wide, scale, zero)
            refitted = (steps * wide).sum(-1) / steps.square().sum(-1).clamp_min(LEAST)
            scale = torch.where(refitted > LEAST, refitted, scale).to(torch.bfloat16).float()
            error = (_steps(wide, scale, zero) * scale[..., None] - wide).square().sum(-1)
            less = error < best
            best = torch.where(less, error, best)
            scales[part] = torch.where(less, scale, scales[part].float()).to(torch.bfloat16)
            zeros[part] = torch.where(less, zero, zeros[part])
    return scales, zeros


def _steps(wide: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """How many scales each weight of groups [R, G, group] becomes."""
    zero = zero[..., None]
    return (wide / scale[..., None] + zero).round_().clamp_(0, LEVELS) - zero


def scheme(word: str, group: int | None) -> dict[str, Any]:
    """quantization_config of config.json."""
    weights: dict[str, Any] = {"num_bits": 8 if word == "int8" else 4, "type": "int"}
    weights |= {"symmetric": word == "int8", "dynamic": False}
    if group is None:
        weights |= {"strategy": "channel", "group_size": None}
    else:
        weights |= {"strategy": "group", "group_size": group}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }


def layout(name: str, shape: tuple[int, ...], word: str, group: int | None) -> dict[str, Any]:
    """{stored name: (dtype, shape)} of one matrix."""
    rows, columns = shape
    bits = 8 if word == "int8" else 4
    groups = 1 if group is None else columns // group
    base, found = name.removesuffix("weight"), {}
    found[base + "weight_packed"] = ("I32", [rows, -(-columns * bits // 32)])
    found[base + "weight_scale"] = ("BF16", [rows, groups])
    found[base + "weight_shape"] = ("I64", [2])
    if word == "int4":
        found[base + "weight_zero_point"] = ("I32", [-(-rows * bits // 32), groups])
    return found


BYTES = {"I32": 4, "BF16": 2, "F16": 2, "F32": 4, "I64": 8}


def quantise(
    folder: Path, out: Path, word: str, group: int | None, report: Report | None = None
) -> dict[str, float]:
    """Write `out` and return {matrix: relative error}. Raises EngineError, in one line, and leaves
    nothing behind then.
    """
    if present(out):
        raise UsageError(f"{out}: exists; delete it or name another folder")
    config = ModelConfig.from_folder(folder)
    checkpoint, wanted = Checkpoint.open(folder), targets(config)
    checkpoint.require(wanted, ignored(config))
    tensors = [part for target in wanted for part in target.parts]
    rounded = {
        name: shape for name, shape in tensors if len(shape) == 2 and name.endswith("proj.weight")
    }
    for name, shape in rounded.items():
        if group is not None and shape[1] % group:
            raise UsageError(f"--group: found {group}, but rows of {name} have {shape[1]} columns")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in tensors:
        info = checkpoint.tensors[name]
        entries = {name: (info.dtype, list(shape))}
        if name in rounded:
            entries = layout(name, shape, word, group)
        for key, (dtype, size) in entries.items():
            end = at + BYTES[dtype] * torch.Size(size).numel()
            header[key] = {"dtype": dtype, "shape": size, "data_offsets": [at, end]}
            at = end
    require_room(out, at + OTHER_FILES)
    with whole_or_absent(out) as beside:
        errors = _write(checkpoint, tensors, set(rounded), header, beside, word, group, report)
        data = read_object(inside(folder, "config.json"))
        data["quantization_config"] = scheme(word, group)
        (beside / "config.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        for name in PATTERNS:
            if "safetensors" not in name and name != "config.json" and present(folder / name):
                shutil.copyfile(inside(folder, name), beside / name)
    return errors


def _write(
    checkpoint: Checkpoint,
    tensors: Sequence[tuple[str, tuple[int, ...]]],
    rounded: set[str],
    header: dict[str, Any],
    folder: Path,
    word: str,
    group: int | None,
    report: Report | None,
) -> dict[str, float]:
    """Write model.safetensors as `header` says, one tensor at a time; the errors of matrices."""
    errors: dict[str, float] = {}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(folder / "model.safetensors", "wb") as out:
        out.write(struct.pack("<Q", len(encoded)) + encoded)
        for number, (name, shape) in enumerate(tensors):
            dtype = DTYPES[checkpoint.tensors[name].dtype]
            ((_, weight),) = checkpoint.stream([Target(name, ((name, shape),))], "cpu", dtype)
            if name not in rounded:
                out.write(weight.view(-1).view(torch.uint8).numpy().tobytes())
                continue
            stored, meant = quantised(weight, word, group)
            for tensor in stored.values():
                out.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            wide = weight.float()
            errors[name] = float((meant - wide).norm() / wide.norm().clamp_min(1e-30))
            if report:
                report(number + 1, len(tensors))
    return errors


def table(errors: dict[str, float]) -> str:
    """A line for each layer: the error of each of its matrices in per cent."""
    layers: dict[str, dict[str, float]] = {}
    for name, error in errors.items():
        number, _, part = name.removeprefix("model.layers.").partition(".")
        layers.setdefault(number, {})[part.split(".")[-2].removesuffix("_proj")] = error
    names = list(next(iter(layers.values())))
    rows = ((n, *(f"{100 * found[name]:.2f}%" for name in names)) for n, found in layers.items())
    return "\n".join(page.table(["layer", *names], rows))


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (not a folder of floats, no room) or 2 (usage)."""
    parser = command(
        "python -m tools.convert.quantise",
        "Round a folder's float weights to few bits, in the compressed-tensors layout.",
    )
    parser.add_argument("model", metavar="MODEL", help="a folder, an alias or a hub id")
    parser.add_argument("out", type=Path, metavar="OUT", help="must not exist yet")
    parser.add_argument("--weights", choices=sorted(GROUPS), required=True)
    parser.add_argument(
        "--group",
        type=int,
        metavar="N",
        help="columns under one scale (int8: whole rows; int4: 32)",
    )
    args = parser.parse_args(argv)

    def work() -> None:
        group = GROUPS[args.weights] if args.group is None else args.group
        if group is not None and (group < 2 or group % 2):
            raise UsageError(f"--group: found {group}, expected an even number of columns")
        folder = Path(resolve(args.model, say).folder)
        errors = quantise(
            folder,
            args.out,
            args.weights,
            group,
            lambda done, of: progress(f"{done} of {of} tensors"),
        )
        say("")
        print(table(errors))
        print(args.out)

    return guarded(work, "stopped; nothing was written")


if __name__ == "__main__":
    sys.exit(main())
