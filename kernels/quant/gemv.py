"""Products of a decode step with weights of few bits: kernels/layer/gemv.py's, where a weight is a
byte or a nibble that becomes a number of 16 bits in a register.

Each weight is read once, as 32-bit words (kernels/quant/words.py). A card that reads 3.35 TB/s
hands 30 nibbles to each of 132 SMs in a clock, and an SM issues 128 operations: 4.3 for a weight.
Nibbles are unpacked as Marlin does it (arXiv 2408.11743): a mask and an `or` make two of them
128 + q in bfloat16 (1024 + q in float16), without a conversion. Tensor cores multiply them by 8
rows at a time; scale and offset come once for the sum of a unit of 16 to 64 columns:
sum(w x) = scale * sum((128 + q) x) + (offset - 128 scale) * sum(x).
"""

from __future__ import annotations

import torch

from kernels.launch.pdl import dependent, wait_for_last_kernel
from kernels.launch.triton import tl, triton
from kernels.layer.gemv import (
    HELD,
    multiply_rows_ref,
    outputs_of_program,
    rows_of,
    store_rows,
)
from kernels.quant.words import PARTS, Words

ROWS = 8  # of a program, the least that tensor cores take beside 16 outputs
UNITS = 16  # of a round, shared out among the warps
MOST_UNIT = 64  # columns
# the number whose last bits a nibble takes; float32 takes nibbles as they are
CARRIERS = {torch.bfloat16: 128.0, torch.float16: 1024.0}


def multiply_few_bits_ref(
    x: torch.Tensor,
    weight: Words,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Reference of `multiply_few_bits`, same arguments."""
    dense = weight.rows(slice(None), x.dtype)
    return multiply_rows_ref(x, dense, bias, residual, gated, out_dtype)


def multiply_few_bits(
    x: torch.Tensor,
    weight: Words,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply the rows of x [..., I] by a weight of few bits [O, I], by the Triton kernel of this
    file.

    x contiguous, at most MOST_ROWS rows of kernels/layer/gemv.py; everything else as in its
    `multiply_rows`. Returns [..., O or O / 2]. Raises ValueError for more rows.
    """
    inputs, outputs = weight.shape[1], weight.shape[0] // (2 if gated else 1)
    rows = rows_of(x, inputs)
    out = torch.empty(*x.shape[:-1], outputs, dtype=out_dtype or x.dtype, device=x.device)
    unit, held = unit_of(weight), HELD // (2 if gated else 1)
    few_bits_kernel[(-(-outputs // held), -(-rows // ROWS))](
        x,
        weight.values,
        weight.scales,
        weight.scales if weight.offsets is None else weight.offsets,
        weight.scales if bias is None else bias,
        x if residual is None else residual,
        out,
        rows,
        outputs,
        inputs,
        weight.values.shape[1],
        weight.scales.shape[1],
        units_of_group(weight, unit),
        HELD=held,
        ROWS=ROWS,
        UNIT=unit,
        UNITS=UNITS,
        PARTS=PARTS[weight.kind],
        ADDED=added_to_values(weight, x.dtype),
        OFFSETS=weight.offsets is not None,
        STAGES=3 if unit > 32 else 4,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        EVEN=inputs % (UNITS * unit) == 0,
        num_warps=4,
        **dependent(x),
    )
    return out


def unit_of(weight: Words) -> int:
    """Columns that are summed before their scale is applied: a power of two, whole blocks."""
    if weight.scales.shape[1] == 1:
        return MOST_UNIT
    return min(MOST_UNIT, weight.group & -weight.group)


def units_of_group(weight: Words, unit: int) -> int:
    """Units of a row of `weight` [O, I] under one scale, all of it where the row has one."""
    if weight.scales.shape[1] == 1:
        return -(-weight.values.shape[1] * PARTS[weight.kind] // unit)
    return weight.group // unit


def added_to_values(weight: Words, dtype: torch.dtype) -> float:
    """The number that `unpacked` adds to a weight's values for activations of a dtype."""
    return CARRIERS.get(dtype, 0.0) if weight.kind == "int4" else 0.0


@triton.jit
def pair(words, number: tl.constexpr, PARTS: tl.constexpr, kind: tl.constexpr):
    """Unpack pair `number` of every word: its two values, of `kind`. Signed bytes; nibbles in the
    last bits of one of CARRIERS, or as they are in float32.
    """
    if PARTS == 4:
        low = ((words << (24 - 8 * number)) >> 24).to(tl.float32).to(kind)
        high = ((words << (8 - 8 * number)) >> 24).to(tl.float32).to(kind)
    elif kind == tl.float32:
        low = ((words >> (4 * number)) & 15).to(tl.float32)
        high = ((words >> (4 * number + 16)) & 15).to(tl.float32)
    else:
        carriers: tl.constexpr = 0x43004300 if kind == tl.bfloat16 else 0x64006400
        both = ((words >> (4 * number)) & 0x000F000F) | carriers
        low = both.to(tl.int16).to(kind, bitcast=True)
        high = (both >> 16).to(tl.int16).to(kind, bitcast=True)
    return low, high


@triton.jit
def unpacked(words, half: tl.constexpr, PARTS: tl.constexpr, kind: tl.constexpr):
    """Unpack half of words [A, B, C], all of those of bytes: [A, B, 4 C] of `kind`, 16 neighbouring
    columns of every block.
    """
    low, high = pair(words, 2 * half, PARTS, kind)
    next_low, next_high = pair(words, 2 * half + 1, PARTS, kind)
    values = tl.join(tl.join(low, next_low), tl.join(high, next_high))
    return tl.reshape(values, [words.shape[0], words.shape[1], 4 * words.shape[2]])


@triton.jit
def word_tile(words, m, u, width, SIZE: tl.constexpr, EVEN: tl.constexpr):
    """Load the SIZE words of units u of outputs m: [units, outputs, words], 0 beyond a row."""
    at = u[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    place = words + m.to(tl.int64)[None, :, None] * width + at[:, None, :]
    if EVEN:
        tile = tl.load(place)
    else:
        tile = tl.load(place, mask=(at < width)[:, None, :], other=0)
    return tile


@triton.jit
def scales_at(scales, offsets, m, g, groups, ADDED: tl.constexpr, OFFSETS: tl.constexpr):
    """Load scale and offset of groups g of outputs m, two indices that broadcast, for what
    `unpacked` gives: float32, 0 outside.
    """
    at, inside = m.to(tl.int64) * groups + g, g < groups
    scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
    offset = scale * -ADDED
    if OFFSETS:
        offset += tl.load(offsets + at, mask=inside, other=0.0).to(tl.float32)
    return scale, offset


@triton.jit
def unit_rows(
    x,
    r,
    u,
    rows,
    inputs,
    half: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Load the columns of units u that a half of their SIZE words holds, of rows r of x:
    [units, rows, columns], 0 outside.
    """
    side = tl.arange(0, 4 * SIZE)
    inner = (side // 16) * (4 * PARTS) + 16 * half + side % 16
    k = u[:, None] * (SIZE * PARTS) + inner[None, :]
    inside = (r < rows)[None, :, None]
    if not EVEN:
        inside = inside & (k < inputs)[:, None, :]
    return tl.load(x + r[None, :, None] * inputs + k[:, None, :], mask=inside, other=0.0)


@triton.jit
def add_units(acc, tile, columns, more, scale, offset, PARTS: tl.constexpr, SHIFTED: tl.constexpr):
    """Add a tile's products, summed within units, to acc [units, outputs, rows]. more: columns of
    words' second halves.
    """
    kind: tl.constexpr = columns.dtype
    weights = unpacked(tile, 0, PARTS, kind)
    columns = tl.permute(columns, [0, 2, 1])
    sums = tl.dot(weights, columns, input_precision="ieee")
    if PARTS == 8:
        more = tl.permute(more, [0, 2, 1])
        sums = tl.dot(unpacked(tile, 1, PARTS, kind), more, sums, input_precision="ieee")
    acc += sums * scale[:, :, None]
    if SHIFTED:
        # the sum of x beside every output, as the sums of products lie; joined as weights are
        side: tl.constexpr = [weights.shape[0], weights.shape[1], weights.shape[2] // 2]
        one = tl.full(side, 1.0, tl.float32).to(kind)
        ones = tl.reshape(tl.join(one, one), weights.shape)
        total = tl.dot(ones, columns, input_precision="ieee")
        if PARTS == 8:
            total = tl.dot(ones, more, total, input_precision="ieee")
        acc += total * offset[:, :, None]
    return acc


@triton.jit
def sums_of_units(
    x,
    words,
    scales,
    offsets,
    held,
    r,
    rows,
    inputs,
    width,
    groups,
    per_group,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
    PARTS: tl.constexpr,
    ADDED: tl.constexpr,
    OFFSETS: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Multiply rows r of x by rows `held` of the weight: sums [outputs, ROWS], float32.

    Warps share the units of a round, and their sums stay apart until the end. The first round's
    words are loaded before the kernel waits for x and multiplied last, as in kernels/layer/gemv.py;
    scales are loaded a round ahead.
    """
    SIZE: tl.constexpr = UNIT // PARTS
    SHIFTED: tl.constexpr = OFFSETS or ADDED > 0
    u = tl.arange(0, UNITS)
    of, each = held[None, :], u[:, None]
    first = word_tile(words, held, u, width, SIZE, EVEN)
    first_scale, first_offset = scales_at(
        scales, offsets, of, each // per_group, groups, ADDED, OFFSETS
    )
    scale, offset = scales_at(
        scales, offsets, of, (each + UNITS) // per_group, groups, ADDED, OFFSETS
    )
    wait_for_last_kernel(DEPENDENT)
    first_columns = unit_rows(x, r, u, rows, inputs, 0, SIZE, PARTS, EVEN)
    first_more = unit_rows(x, r, u, rows, inputs, PARTS // 8, SIZE, PARTS, EVEN)
    acc = tl.zeros([UNITS, held.shape[0], ROWS], tl.float32)
    for start in tl.range(UNITS, tl.cdiv(width, SIZE), UNITS, num_stages=STAGES):
        now_scale, now_offset = scale, offset
        ahead = (start + UNITS + each) // per_group
        scale, offset = scales_at(scales, offsets, of, ahead, groups, ADDED, OFFSETS)
        tile = word_tile(words, held, start + u, width, SIZE, EVEN)
        columns = unit_rows(x, r, start + u, rows, inputs, 0, SIZE, PARTS, EVEN)
        more = unit_rows(x, r, start + u, rows, inputs, PARTS // 8, SIZE, PARTS, EVEN)
        acc = add_units(acc, tile, columns, more, now_scale, now_offset, PARTS, SHIFTED)
    acc = add_units(
        acc, first, first_columns, first_more, first_scale, first_offset, PARTS, SHIFTED
    )
    return tl.sum(acc, 0)


@triton.jit(do_not_specialize=["rows"])
def few_bits_kernel(
    x,
    words,
    scales,
    offsets,
    bias,
    residual,
    out,
    rows,
    outputs,
    inputs,
    width,
    groups,
    per_group,
    HELD: tl.constexpr,
    ROWS: tl.constexpr,
    UNIT: tl.constexpr,
    UNITS: tl.constexpr,
    PARTS: tl.constexpr,
    ADDED: tl.constexpr,
    OFFSETS: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute HELD outputs of ROWS rows: grid (tiles of outputs, tiles of rows)."""
    kind: tl.constexpr = x.dtype.element_ty
    n, m, stored = outputs_of_program(outputs, HELD, GATED)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    # rows beyond the last read the last one again, and are not stored
    held = tl.minimum(m, stored - 1)
    sums = sums_of_units(
        x, words, scales, offsets, held, r, rows, inputs, width, groups, per_group,
        ROWS, UNIT, UNITS, PARTS, ADDED, OFFSETS, STAGES, EVEN, DEPENDENT,
    )  # fmt: skip
    store_rows(
        sums, bias, residual, out, n, m, r, rows, outputs, stored, kind, GATED, BIAS, RESIDUAL
    )
