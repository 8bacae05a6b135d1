"""Blocks of GGUF files as matrices of few bits: 4-bit kinds as they are, 5-, 6- and 8-bit kinds as
int8 in groups.

A value is d * q, d * (q - 8), d * q + m and the like; every kind becomes values * scale + offset
over groups of 16 or 32 columns. Layouts: ggml's docs/gguf.md and ggml-quants. Pure functions of the
stored bytes; weights.quantised.stored checks what comes out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weights.quantised.stored import Form, Stored, packed_nibbles

SUPER = 256  # elements of a K-quant's block
PIECE = 4 << 20  # bytes of blocks that are read at a time


def _half(raw: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 2] -> the float16 that it holds [...], as float32."""
    return raw.contiguous().view(torch.float16)[..., 0].float()


def _paired(both: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 16], element j low and j + 16 high -> values [..., 32]."""
    return torch.cat((both & 15, both >> 4), -1)


def _q8_0(blocks: torch.Tensor) -> Stored:
    scales = _half(blocks[..., :2])
    return Stored("int8", blocks[..., 2:].flatten(1).view(torch.int8), scales, 32)


def _q4(blocks: torch.Tensor, offset: bool) -> Stored:
    scales = _half(blocks[..., :2])
    offsets = _half(blocks[..., 2:4]) if offset else -8 * scales
    values = _paired(blocks[..., 4 if offset else 2 :]).flatten(1)
    return Stored("int4", packed_nibbles(values), scales, 32, offsets)


def _q5(blocks: torch.Tensor, offset: bool) -> Stored:
    at = 4 if offset else 2
    scales = _half(blocks[..., :2])
    bits = torch.arange(8, dtype=torch.uint8)
    high = ((blocks[..., at : at + 4, None] >> bits) & 1).flatten(-2)
    values = (_paired(blocks[..., at + 4 :]) | (high << 4)).flatten(1).to(torch.int8)
    if offset:
        return Stored("int8", values, scales, 32, _half(blocks[..., 2:4]))
    return Stored("int8", values - 16, scales, 32)


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes -> scales and minima of 8 sub-blocks, 6 bits each: [..., 8] twice."""
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), -1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), -1)
    return scales.float(), minima.float()


def _k(blocks: torch.Tensor, high: bool) -> Stored:
    """Q4_K, and with a fifth bit (`high`) Q5_K."""
    scale, least = _half(blocks[..., :2])[..., None], _half(blocks[..., 2:4])[..., None]
    scales, minima = _six_bits(blocks[..., 4:16])
    both = blocks[..., 48 if high else 16 :].unflatten(-1, (4, 32))
    values = torch.stack((both & 15, both >> 4), -2).flatten(-3, -2)  # [R, B, 8, 32]
    scales, offsets = (scale * scales).flatten(1), (-least * minima).flatten(1)
    if not high:
        return Stored("int4", packed_nibbles(values.flatten(1)), scales, 32, offsets)
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks[..., 16:48][..., None, :] >> bits) & 1
    whole = (values | (fifth << 4)).flatten(1).to(torch.int8)
    return Stored("int8", whole, scales, 32, offsets)


def _q6_k(blocks: torch.Tensor) -> Stored:
    low = blocks[..., :128].unflatten(-1, (2, 2, 32))  # half, which 32, l
    high = blocks[..., 128:192].unflatten(-1, (2, 32))
    parts = [
        (low[..., number % 2, :] & 15 if number < 2 else low[..., number % 2, :] >> 4)
        | (((high >> (2 * number)) & 3) << 4)
        for number in range(4)
    ]
    values = torch.stack(parts, -2).flatten(1).to(torch.int8) - 32
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float()
    return Stored("int8", values, (_half(blocks[..., 208:210])[..., None] * scales).flatten(1), 16)


# kind -> (elements, bytes) of a block, and what it becomes
BLOCKS: dict[str, tuple[int, int, Callable[[torch.Tensor], Stored]]] = {
    "Q8_0": (32, 34, _q8_0),
    "Q4_0": (32, 18, lambda blocks: _q4(blocks, False)),
    "Q4_1": (32, 20, lambda blocks: _q4(blocks, True)),
    "Q5_0": (32, 22, lambda blocks: _q5(blocks, False)),
    "Q5_1": (32, 24, lambda blocks: _q5(blocks, True)),
    "Q4_K": (SUPER, 144, lambda blocks: _k(blocks, False)),
    "Q5_K": (SUPER, 176, lambda blocks: _k(blocks, True)),
    "Q6_K": (SUPER, 210, _q6_k),
}


FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# kind -> (elements, bytes) of a block, of every type that is read
SIZES = {
    **{kind: (1, dtype.itemsize) for kind, dtype in FLOATS.items()},
    **{kind: (elements, width) for kind, (elements, width, _) in BLOCKS.items()},
}
FORMS = {
    "Q8_0": Form("int8", 32),
    "Q4_0": Form("int4", 32, True),
    "Q4_1": Form("int4", 32, True),
    "Q5_0": Form("int8", 32),
    "Q5_1": Form("int8", 32, True),
    "Q4_K": Form("int4", 32, True),
    "Q5_K": Form("int8", 32, True),
    "Q6_K": Form("int8", 16),
}


def decode(kind: str, raw: torch.Tensor) -> Stored:
    """Read rows of blocks, uint8 [R, bytes of a row], of a kind of BLOCKS; PIECE bytes at a time,
    because some kinds take ten times their size on the way.
    """
    _, width, read = BLOCKS[kind]
    rows, step = raw.shape[0], max(1, PIECE // raw.shape[1])
    whole: Stored | None = None
    for start in range(0, rows, step):
        part = read(raw[start : start + step].unflatten(1, (-1, width)))
        if whole is None:
            if step >= rows:
                return part
            empty: Any = {
                name: value.new_empty(rows, value.shape[1])
                for name, value in part._asdict().items()
                if isinstance(value, torch.Tensor)
            }
            whole = part._replace(**empty)
        for found, into in zip(part, whole):
            if isinstance(found, torch.Tensor) and isinstance(into, torch.Tensor):
                into[start : start + step] = found
    assert whole is not None
    return whole
