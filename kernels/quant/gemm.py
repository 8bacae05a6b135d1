"""Products of many rows with weights of few bits: a tile of the weight is dequantised in registers
and multiplied by tensor cores in the activations' dtype, so that no dequantised copy of the weight
is ever in memory.

A product does not care in which order it sums columns. So half of all words of a tile is one
product with the columns that belong to it, 16 neighbours of each block, and nothing is shuffled.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.launch.shapes import PROCESSORS, power_of_two, processors
from kernels.launch.triton import tl, triton
from kernels.quant.gemv import added_to_values, scales_at, units_of_group, unpacked
from kernels.quant.words import PARTS, WORDS, Words

MANY = 64  # rows from which a tile is as large as prefill wants it


class TileConfig(NamedTuple):
    """Rows and outputs of a program, blocks of a round, warps and stages of its loads."""

    rows: int
    outputs: int
    blocks: int
    warps: int
    stages: int


def tile_config(rows: int, outputs: int, kind: str, processors: int = PROCESSORS) -> TileConfig:
    """The tile for a number of rows of x and outputs of a weight of `kind`: one that gives every SM
    of a card a program.
    """
    if rows > MANY:
        wide = 128 if -(-rows // 128) * (outputs // 128) >= processors else 64
        # int4 reads 32 KB of x a round: two rounds at a time fit the 99 KB of sm_89
        return TileConfig(128, wide, 4, 8, 2 if kind == "int4" else 3)
    padded = max(16, power_of_two(rows))
    return TileConfig(padded, 32, 4, 4, 4)


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
        weight.scales if weight.offsets is None else weight.offsets,
        weight.scales if bias is None else bias,
        out,
        rows,
        outputs,
        inputs,
        weight.values.shape[1] // WORDS,
        weight.scales.shape[1],
        units_of_group(weight, weight.columns_of_block),
        ROWS=config.rows,
        OUTPUTS=config.outputs,
        BLOCKS=config.blocks,
        PARTS=PARTS[weight.kind],
        ADDED=added_to_values(weight, x.dtype),
        OFFSETS=weight.offsets is not None,
        BIAS=bias is not None,
        EVEN=inputs % (config.blocks * weight.columns_of_block) == 0,
        STAGES=config.stages,
        num_warps=config.warps,
        # of 32 rows: left alone ptxas aims at 72 for sm_89, and spills 8 bytes
        **(dict(maxnreg=128) if config.warps == 4 else {}),
    )
    return out


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
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    ADDED: tl.constexpr,
    OFFSETS: tl.constexpr,
    BIAS: tl.constexpr,
    EVEN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Compute OUTPUTS outputs of ROWS rows: grid (tiles of rows, tiles of outputs).

    Rows and outputs beyond the last ones read the last ones again, and are not stored.
    """
    kind: tl.constexpr = x.dtype.element_ty
    WIDTH: tl.constexpr = 4 * BLOCKS
    SHIFTED: tl.constexpr = OFFSETS or ADDED > 0
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = x + tl.minimum(r, rows - 1).to(tl.int64)[:, None] * inputs
    held = tl.minimum(n, outputs - 1)[:, None]
    first = words + held.to(tl.int64) * (blocks * 4)
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in tl.range(0, blocks, BLOCKS, num_stages=STAGES):
        at = start * 4 + tl.arange(0, WIDTH)
        b = start + tl.arange(0, BLOCKS)
        if EVEN:
            tile = tl.load(first + at[None, :])
        else:
            tile = tl.load(first + at[None, :], mask=(at < blocks * 4)[None, :], other=0)
        scale, offset = scales_at(
            scales, offsets, held, (b // per_group)[None, :], groups, ADDED, OFFSETS
        )
        tile = tl.reshape(tile, [OUTPUTS, BLOCKS, 4])
        side = tl.arange(0, 4 * WIDTH)
        for half in tl.static_range(PARTS // 4):
            k = (start + side // 16) * (4 * PARTS) + 16 * half + side % 16
            if EVEN:
                columns = tl.load(row + k[None, :])
            else:
                columns = tl.load(row + k[None, :], mask=(k < inputs)[None, :], other=0.0)
            weight = unpacked(tile, half, PARTS, kind).to(tl.float32) * scale[:, :, None]
            if SHIFTED:
                weight += offset[:, :, None]
            weight = tl.reshape(weight.to(kind), [OUTPUTS, 4 * WIDTH])
            acc = tl.dot(columns, tl.trans(weight), acc)
    if BIAS:
        acc += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
    to = out + r.to(tl.int64)[:, None] * outputs + n[None, :]
    tl.store(to, acc.to(kind), mask=(r < rows)[:, None] & (n < outputs)[None, :])
