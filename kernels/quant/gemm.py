"""Products of many rows with weights of few bits: a tile of the weight is dequantised in registers
and multiplied by tensor cores in the activations' dtype, so that no dequantised copy of the weight
is ever in memory.

A product does not care in which order it sums columns. So half of all words of a tile is one
product with the columns that belong to it, 16 neighbours of each part, and nothing is shuffled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.launch.shapes import PROCESSORS, power_of_two, processors
from kernels.launch.triton import tl, triton
from kernels.quant.gemv import CARRIERS, apart, pair, side_by_side, unpacked
from kernels.quant.words import BLOCK_WORDS, PARTS, Words

MANY = 64  # rows from which a tile is as large as prefill wants it


class TileConfig(NamedTuple):
    """Rows and outputs of a program, warps and stages of its loads."""

    rows: int
    outputs: int
    warps: int
    stages: int


def tile_config(rows: int, outputs: int, kind: str, processors: int = PROCESSORS) -> TileConfig:
    """The tile for a number of rows of x and outputs of a weight of `kind`: one that gives every SM
    of a card a program.
    """
    if rows > MANY:
        wide = 128 if -(-rows // 128) * (outputs // 128) >= processors else 64
        # int4 reads 32 KB of x a round: two rounds at a time fit the 99 KB of sm_89
        return TileConfig(128, wide, 8, 2 if kind == "int4" else 3)
    padded = max(16, power_of_two(rows))
    return TileConfig(padded, 32, 4, 4)


def multiply_tiles(
    x: torch.Tensor, weight: Words, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply the rows of x [..., I] by a weight of few bits [O, I] by the Triton kernel of this
    file.

    x contiguous, in 16 bits; any number of rows. The weight is rounded to x's dtype, sums are
    float32, and bias [O] is added before they are rounded. Returns [..., O].
    """
    outputs, inputs = weight.shape
    rows = x.numel() // inputs
    out = torch.empty(*x.shape[:-1], outputs, dtype=x.dtype, device=x.device)
    config = tile_config(rows, outputs, weight.kind, processors(x.device))
    # programs of the same outputs follow each other, so that their weights come from the cache
    grid = -(-rows // config.rows), -(-outputs // config.outputs)
    tiles_kernel[grid](
        x,
        weight.values,
        weight.scales,
        weight.scales if weight.joined or weight.offsets is None else weight.offsets,
        weight.scales if bias is None else bias,
        out,
        rows,
        outputs,
        inputs,
        weight.values.shape[1] // BLOCK_WORDS,
        weight.scales.shape[1],
        parts_of_group(weight),
        ROWS=config.rows,
        OUTPUTS=config.outputs,
        PARTS=PARTS[weight.kind],
        CARRIER=CARRIERS[x.dtype],
        JOINED=weight.joined,
        OFFSETS=weight.offsets is not None,
        BIAS=bias is not None,
        EVEN=inputs % weight.columns_of_block == 0,
        STAGES=config.stages,
        num_warps=config.warps,
        # of 32 rows: left alone ptxas aims at 72 for sm_89, and spills 8 bytes
        **(dict(maxnreg=128) if config.warps == 4 else {}),
    )
    return out


def parts_of_group(weight: Words) -> int:
    """Parts of blocks of a row of `weight` [O, I] under one scale, all of them where the row has
    one.
    """
    if weight.scales.shape[1] == 1:
        return 4 * weight.values.shape[1] // BLOCK_WORDS
    return 4 * weight.group // weight.columns_of_block


@triton.jit
def scales_at(scales, offsets, at, inside, JOINED: tl.constexpr, OFFSETS: tl.constexpr):
    """Load scales and offsets of groups at places: float32, 0 where not inside."""
    if JOINED:
        both = tl.load(scales.to(tl.pointer_type(tl.int32), bitcast=True) + at, inside, 0)
        scale, offset = apart(both, scales.dtype.element_ty)
    else:
        scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
        if OFFSETS:
            offset = tl.load(offsets + at, mask=inside, other=0.0).to(tl.float32)
        else:
            offset = scale * 0.0
    return scale, offset


@triton.jit
def numbers(
    tile, half: tl.constexpr, PARTS: tl.constexpr, CARRIER: tl.constexpr, kind: tl.constexpr
):
    """Unpack half of words [A, B, C] to float32 [A, B, 4 C]: bytes as they are, nibbles with what
    they carry in `kind`.
    """
    if PARTS == 4:
        low, high = pair(tile, 0, PARTS, tl.float32, CARRIER)
        next_low, next_high = pair(tile, 1, PARTS, tl.float32, CARRIER)
        found = side_by_side(low.to(kind), high.to(kind), next_low.to(kind), next_high.to(kind))
    else:
        found = unpacked(tile, half, PARTS, kind, CARRIER)
    return found.to(tl.float32)


@triton.jit
def tiles_kernel(
    x,
    words,
    scales,
    offsets,
    bias,
    out,
    rows,
    outputs,
    inputs,
    blocks,
    groups,
    per_group,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    CARRIER: tl.constexpr,
    JOINED: tl.constexpr,
    OFFSETS: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute OUTPUTS outputs of ROWS rows, a block of words at a time: grid (tiles of rows, tiles
    of outputs).

    Rows and outputs beyond the last ones read the last ones again, and are not stored.
    """
    kind: tl.constexpr = x.dtype.element_ty
    # what nibbles carry
    ADDED: tl.constexpr = 0.0 if PARTS == 4 else 128.0 if kind == tl.bfloat16 else 1024.0
    SHIFTED: tl.constexpr = OFFSETS or ADDED > 0
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = x + tl.minimum(r, rows - 1).to(tl.int64)[:, None] * inputs
    held = tl.minimum(n, outputs - 1).to(tl.int64)[:, None]
    first = words + held * (blocks * 16) + tl.arange(0, 16)[None, :]
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for block in tl.range(0, blocks, 1, num_stages=STAGES):
        tile = tl.load(first + block * 16)
        g = (4 * block + tl.arange(0, 4)) // per_group
        scale, offset = scales_at(
            scales, offsets, held * groups + g[None, :], (g < groups)[None, :], JOINED, OFFSETS
        )
        offset -= ADDED * scale
        # from lanes' words side by side to parts' words side by side
        tile = tl.permute(tl.reshape(tile, [OUTPUTS, 4, 4]), [0, 2, 1])
        side = tl.arange(0, 64)
        for half in tl.static_range(PARTS // 4):
            k = (4 * block + side // 16) * (4 * PARTS) + 16 * half + side % 16
            if EVEN:
                columns = tl.load(row + k[None, :])
            else:
                columns = tl.load(row + k[None, :], mask=(k < inputs)[None, :], other=0.0)
            weight = numbers(tile, half, PARTS, CARRIER, kind) * scale[:, :, None]
            if SHIFTED:
                weight += offset[:, :, None]
            weight = tl.reshape(weight.to(kind), [OUTPUTS, 64])
            acc = tl.dot(columns, tl.trans(weight), acc)
    if BIAS:
        acc += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    to = out + r.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(to, acc.to(kind), mask=(r < rows)[:, None] & (n < outputs)[None, :])
