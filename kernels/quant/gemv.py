"""Products of a decode step with weights of few bits: kernels/layer/gemv.py's, where a weight is a
byte or a nibble that becomes a float in a register.

Each weight is read once, as 32-bit words (kernels/quant/words.py). At one row a card that reads
3.35 TB/s hands 30 nibbles to each of 132 SMs in a clock, and an SM issues 128 operations: 4.3 for a
weight. So a nibble takes one shift, one mask that also sets the exponent (the float 16 + q, without
a conversion), and one multiplication; scale and offset come once for the 32 weights of a block:
sum(w x) = scale * sum((16 + q) x) + (offset - 16 scale) * sum(x).
"""

from __future__ import annotations

import torch

from kernels.launch.pdl import dependent, wait_for_last_kernel
from kernels.launch.shapes import power_of_two
from kernels.launch.triton import tl, triton
from kernels.layer.gemv import (
    MOST_ROWS,
    finished,
    multiply_rows_ref,
    opened,
    outputs_of,
    store_rows,
)
from kernels.quant.words import PARTS, WORDS, Words

# blocks of one output that a program holds at a time: with 4 outputs 8 KB, and as much in flight
STEP = 128
# a thread's, of one row of int4 with a residual: what it takes elsewhere; left alone ptxas aims at
# 80 for sm_100, and spills 24 bytes
REGISTERS = 96
SIXTEEN = 0x41800000  # the bits of 16.0


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

    x contiguous, at most few_rows.MOST_ROWS rows; everything else as in few_rows.multiply_rows.
    Returns [..., O or O / 2]. Raises ValueError for more rows.
    """
    inputs, outputs = weight.shape[1], weight.shape[0] // (2 if gated else 1)
    rows = x.numel() // inputs
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"x: found {rows} rows, expected 1 to {MOST_ROWS}")
    out = torch.empty(*x.shape[:-1], outputs, dtype=out_dtype or x.dtype, device=x.device)
    padded, blocks = power_of_two(rows), weight.values.shape[1] // WORDS
    step = max(8, min(STEP // padded, power_of_two(blocks)))
    held = outputs_of(outputs, 2 if gated or rows > 2 else 4)
    bounded = rows == 1 and residual is not None and weight.kind == "int4"
    few_bits_kernel[(-(-outputs // held),)](
        x,
        weight.values,
        weight.scales,
        weight.scales if weight.offsets is None else weight.offsets,
        weight.scales if bias is None else bias,
        x if residual is None else residual,
        out,
        outputs,
        inputs,
        blocks,
        weight.scales.shape[1],
        # blocks under one scale; a row with one scale is one group, however long
        blocks_of_group(weight),
        SIXTEEN,
        ROWS=rows,
        PADDED=padded,
        HELD=held,
        BLOCKS=step,
        PARTS=PARTS[weight.kind],
        OFFSETS=weight.offsets is not None,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        EVEN=inputs % (step * weight.columns_of_block) == 0,
        num_warps=4,
        **(dict(maxnreg=REGISTERS) if bounded else {}),
        **dependent(x),
    )
    return out


def blocks_of_group(weight: Words) -> int:
    """Blocks of a row of `weight` [O, I] under one scale, all of it where the row has one."""
    if weight.scales.shape[1] == 1:
        return weight.values.shape[1] // WORDS
    return weight.group // weight.columns_of_block


@triton.jit
def unpacked(words, sixteen, part: tl.constexpr, PARTS: tl.constexpr, EXACT: tl.constexpr):
    """Part `part` of every word as float32: a signed byte, or 16 + a nibble. EXACT: a nibble as it
    is, for rows in float32, where the 16 would cost two bits.

    sixteen: the bits of 16.0, as an argument of the kernel: with two literals `and` and `or` are
    two instructions, with one they are one.
    """
    if PARTS == 4:
        return ((words << (24 - 8 * part)) >> 24).to(tl.float32)
    if EXACT:
        return ((words >> (4 * part)) & 15).to(tl.float32)
    # the exponent of 16, and q in the four highest bits of the mantissa
    if part < 5:
        shifted = words << (19 - 4 * part)
    else:
        shifted = words >> (4 * part - 19)
    return ((shifted & 0x780000) | sixteen).to(tl.float32, bitcast=True)


@triton.jit
def block_scales(
    scales,
    offsets,
    n,
    g,
    groups,
    inside,
    PARTS: tl.constexpr,
    OFFSETS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Scale and offset of groups g of outputs n, for what `unpacked` gives: float32, two times
    [outputs, groups].
    """
    at = n.to(tl.int64)[:, None] * groups + g[None, :]
    scale = tl.load(scales + at, mask=inside, other=0.0).to(tl.float32)
    if OFFSETS:
        offset = tl.load(offsets + at, mask=inside, other=0.0).to(tl.float32)
    else:
        offset = tl.zeros_like(scale)
    if PARTS == 8 and not EXACT:
        offset -= 16.0 * scale
    return scale, offset


@triton.jit
def word_tile(
    words,
    scales,
    offsets,
    n,
    b,
    outputs,
    blocks,
    groups,
    per_group,
    PARTS: tl.constexpr,
    OFFSETS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Load blocks b of outputs n: words [HELD, BLOCKS, 4], scales and offsets [HELD, BLOCKS]; 0
    outside.
    """
    inside = (n < outputs)[:, None] & (b < blocks)[None, :]
    first = (n.to(tl.int64)[:, None] * blocks + b[None, :]) * 4
    tile = tl.load(
        words + first[:, :, None] + tl.arange(0, 4)[None, None, :],
        mask=inside[:, :, None],
        other=0,
        eviction_policy="evict_first",
    )
    scale, offset = block_scales(
        scales, offsets, n, b // per_group, groups, inside, PARTS, OFFSETS, EXACT
    )
    return tile, scale, offset


@triton.jit
def loaded(at, inside, EVEN: tl.constexpr):
    """Load activations as float32; 0 outside, where there is an outside."""
    if EVEN:
        found = tl.load(at)
    else:
        found = tl.load(at, mask=inside, other=0.0)
    return found.to(tl.float32)


@triton.jit
def block_sums(
    tile,
    scale,
    offset,
    x,
    b,
    inputs,
    sixteen,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    OFFSETS: tl.constexpr,
    EVEN: tl.constexpr,
    EXACT: tl.constexpr,
):
    """Multiply a tile of blocks by every row of x at its columns, summed within a block:
    [HELD, BLOCKS] for one row, [HELD, PADDED, BLOCKS] for several.
    """
    # rows beyond the last read the last one again, and are not stored
    r = tl.minimum(tl.arange(0, PADDED), ROWS - 1)
    for part in tl.static_range(PARTS):
        k = (b * (4 * PARTS) + 4 * part)[:, None] + tl.arange(0, 4)[None, :]
        u = unpacked(tile, sixteen, part, PARTS, EXACT)
        if ROWS == 1:
            row = loaded(x + k, k < inputs, EVEN)
            product = u * row[None, :, :]
        else:
            at = x + r[:, None, None] * inputs + k[None, :, :]
            row = loaded(at, (k < inputs)[None, :, :], EVEN)
            product = u[:, None, :, :] * row[None, :, :, :]
        if part == 0:
            products = product
            total = row
        else:
            products += product
            total += row
    SHIFTED: tl.constexpr = OFFSETS or (PARTS == 8 and not EXACT)
    if ROWS == 1:
        sums = tl.sum(products, 2) * scale
        if SHIFTED:
            sums += tl.sum(total, 1)[None, :] * offset
    else:
        sums = tl.sum(products, 3) * scale[:, None, :]
        if SHIFTED:
            sums += tl.sum(total, 2)[None, :, :] * offset[:, None, :]
    return sums


@triton.jit
def gate_and_up(outputs, HELD: tl.constexpr):
    """Rows of the weight that a program of a gated product takes: HELD of the first half, then the
    same of the second; one past the last row for what lies beyond the half.
    """
    i = tl.arange(0, 2 * HELD)
    n = tl.program_id(0) * HELD + i % HELD
    return tl.where(n < outputs, n + (i // HELD) * outputs, 2 * outputs)


@triton.jit(do_not_specialize=["sixteen"])
def few_bits_kernel(
    x,
    words,
    scales,
    offsets,
    bias,
    residual,
    out,
    outputs,
    inputs,
    blocks,
    groups,
    per_group,
    sixteen,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    HELD: tl.constexpr,
    BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    OFFSETS: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute HELD outputs of every row: grid (tiles of outputs). Loads run ahead of products as in
    few_rows.product_kernel. GATED: a program takes HELD rows of the first half of the weight, and
    the same of the second.
    """
    kind = x.dtype.element_ty
    EXACT: tl.constexpr = kind == tl.float32
    n = tl.program_id(0) * HELD + tl.arange(0, HELD)
    b = tl.arange(0, BLOCKS)
    if GATED:
        m, stored = gate_and_up(outputs, HELD), 2 * outputs
    else:
        m, stored = n, outputs
    tile, scale, offset = word_tile(
        words, scales, offsets, m, b, stored, blocks, groups, per_group, PARTS, OFFSETS, EXACT
    )
    wait_for_last_kernel(DEPENDENT)
    if ROWS == 1:
        acc = tl.zeros([m.shape[0], BLOCKS], tl.float32)
    else:
        acc = tl.zeros([m.shape[0], PADDED, BLOCKS], tl.float32)
    for start in range(0, blocks, BLOCKS):
        now, now_scale, now_offset = tile, scale, offset
        ahead = start + BLOCKS + b
        tile, scale, offset = word_tile(
            words, scales, offsets, m, ahead, stored, blocks, groups, per_group, PARTS, OFFSETS,
            EXACT,
        )  # fmt: skip
        acc += block_sums(
            now, now_scale, now_offset, x, start + b, inputs, sixteen, ROWS, PADDED, PARTS,
            OFFSETS, EVEN, EXACT,
        )  # fmt: skip
    y = finished(acc, bias, m, stored, kind, ROWS, BIAS)
    if GATED:
        gate, up = tl.split(tl.trans(tl.reshape(y, [2, HELD * PADDED])))
        y = opened(gate, up, kind)
        if ROWS > 1:
            y = tl.reshape(y, [HELD, PADDED])
    store_rows(y, residual, out, n, outputs, kind, ROWS, PADDED, RESIDUAL)
