"""Products of a decode step with weights of few bits: kernels/layer/gemv.py's, where a weight is a
byte or a nibble that becomes a number of 16 bits in a register.

Each weight is read once, as 32-bit words (kernels/quant/words.py), from memory straight into the
registers in which tensor cores want it: a thread's 16 bytes are the weights of its own place in the
operand, so nothing passes through shared memory and no warp waits for another before the end. A
card that reads 3.35 TB/s hands 30 nibbles to each of 132 SMs in a clock, and an SM issues 128
operations: 4.3 for a weight, of which the loop takes 2.4.

Weights are unpacked as Marlin does it (arXiv 2408.11743): one operation masks two of them and puts
them into the last bits of 128, in bfloat16, or of 1024, in float16. bfloat16 has room for 7 bits,
so a byte is two such numbers, its last seven bits and its sign. Tensor cores multiply by 8 rows;
scale and offset come once for the sum of a unit of 16 to 128 columns:
sum(w x) = scale * sum((128 + q) x) + (offset - 128 scale) * sum(x).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.launch.pdl import dependent, wait_for_last_kernel
from kernels.launch.shapes import card
from kernels.launch.triton import tl, triton
from kernels.layer.gemv import (
    multiply_rows_ref,
    outputs_of_program,
    row_of_place,
    rows_of,
    store_rows,
)
from kernels.quant.words import BLOCK_WORDS, PARTS, Words

ROWS = 8  # of a program, the least that tensor cores take beside 16 outputs
HELD = 32  # outputs of a program, 16 of a warp: x is read once for so many
ALONG = 4  # warps that share out a row's blocks
SETS = 2  # blocks of a warp that are in registers or on their way there
# the number whose last bits a weight takes, twice in a word; float32 takes weights as they are
CARRIERS = {torch.bfloat16: 0x43004300, torch.float16: 0x64006400}
# what the kernel's numbers are more than the weights, by kind and dtype
ADDED = {
    ("int4", torch.bfloat16): 128.0,
    ("int4", torch.float16): 1024.0,
    ("int8", torch.bfloat16): 192.0,
    ("int8", torch.float16): 1152.0,
}


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
    held = HELD // (2 if gated else 1)
    x = whole_lanes(x)
    few_bits_kernel[(-(-outputs // held), -(-rows // ROWS))](
        x,
        *words_of(weight),
        weight.scales if bias is None else bias,
        x if residual is None else residual,
        out,
        rows,
        outputs,
        x.shape[-1],
        *counts_of(weight, x),
        HELD=held,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        **words_launch(weight, x),
        **dependent(x),
    )
    return out


def whole_lanes(x: torch.Tensor) -> torch.Tensor:
    """x [..., I], or a copy with columns of zeros behind it: a lane reads four at once."""
    return F.pad(x, (0, -x.shape[-1] % 4)) if x.shape[-1] % 4 else x


def words_of(weight: Words) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return words, scales and offsets as `sums_of_blocks` takes them."""
    apart = weight.offsets is not None and not weight.joined
    return weight.values, weight.scales, weight.offsets if apart else weight.scales  # type: ignore


def counts_of(weight: Words, x: torch.Tensor) -> tuple[int, int, int]:
    """Return blocks of a row, its scales, and the carrier of x's dtype."""
    blocks = weight.values.shape[1] // BLOCK_WORDS
    return blocks, weight.scales.shape[1], CARRIERS.get(x.dtype, 0)


def words_launch(weight: Words, x: torch.Tensor) -> dict[str, int | float | bool]:
    """Return the constants of a launch over HELD rows of `weight` and x of `whole_lanes`."""
    unit, sets = unit_of(weight), SETS if x.itemsize == 2 else 1
    even = x.shape[-1] % (sets * ALONG * weight.columns_of_block) == 0
    return dict(
        ROWS=ROWS,
        ALONG=ALONG,
        SETS=sets,
        UNITS=weight.columns_of_block // unit,
        PARTS=PARTS[weight.kind],
        PER_GROUP=units_of_group(weight, unit),
        JOINED=weight.joined,
        ADDED=ADDED.get((weight.kind, x.dtype), 0.0),
        OFFSETS=weight.offsets is not None,
        WHOLE=x.shape[-1] % weight.columns_of_block == 0,
        EVEN=even,
        num_warps=ALONG * HELD // 16,
        # two programs fill the registers of an SM; left alone ptxas aims at 80 and spills 8 bytes
        **(dict(maxnreg=128) if even and x.itemsize == 2 and _told(x) else {}),
    )


def _told(x: torch.Tensor) -> bool:
    """Tell whether ptxas is told how many registers a product may take: not on capability 12, where
    it spills 8 to 16 bytes of gated ones so, and none, in 106 to 108 registers, left alone.
    """
    found = card(x.device)
    return torch.version.hip is None and (found is None or found.capability[0] != 12)


def unit_of(weight: Words) -> int:
    """Columns that are summed before their scale is applied: a power of two, at most a block."""
    if weight.scales.shape[1] == 1:
        return weight.columns_of_block
    return min(weight.columns_of_block, weight.group & -weight.group)


def units_of_group(weight: Words, unit: int) -> int:
    """Units of a row of `weight` [O, I] under one scale, 0 where the whole row has one."""
    return 0 if weight.scales.shape[1] == 1 else weight.group // unit


@triton.jit
def halves(both, kind: tl.constexpr):
    """The two numbers of `kind`, of 16 bits, that words hold: the lower and the upper one."""
    return both.to(tl.int16).to(kind, bitcast=True), (both >> 16).to(tl.int16).to(
        kind, bitcast=True
    )


@triton.jit
def pair(words, number: tl.constexpr, PARTS: tl.constexpr, kind: tl.constexpr, carrier):
    """Unpack pair `number` of every word: its two values, of `kind`, with what is ADDED; of bytes
    in bfloat16 the last seven bits, 128 added.
    """
    if PARTS == 4:
        if kind == tl.float32:
            low = ((words << (24 - 8 * number)) >> 24).to(tl.float32)
            high = ((words << (8 - 8 * number)) >> 24).to(tl.float32)
        elif kind == tl.bfloat16:
            low, high = halves(((words >> (8 * number)) & 0x007F007F) | carrier, kind)
        else:
            # the sign's bit turned over adds 128
            low, high = halves(((words >> (8 * number)) & 0x00FF00FF) ^ (carrier + 0x800080), kind)
    elif kind == tl.float32:
        low = ((words >> (4 * number)) & 15).to(tl.float32)
        high = ((words >> (4 * number + 16)) & 15).to(tl.float32)
    else:
        low, high = halves(((words >> (4 * number)) & 0x000F000F) | carrier, kind)
    return low, high


@triton.jit
def side_by_side(low, high, next_low, next_high):
    """Lay two pairs of every word [A, B, C] side by side: [A, B, 4 C]."""
    values = tl.join(tl.join(low, next_low), tl.join(high, next_high))
    return tl.reshape(values, [low.shape[0], low.shape[1], 4 * low.shape[2]])


@triton.jit
def unpacked(words, half: tl.constexpr, PARTS: tl.constexpr, kind: tl.constexpr, carrier):
    """Unpack half of words [A, B, C], all of those of bytes, as `pair` does: [A, B, 4 C] of `kind`,
    16 neighbouring columns for every 4 words.
    """
    low, high = pair(words, 2 * half, PARTS, kind, carrier)
    next_low, next_high = pair(words, 2 * half + 1, PARTS, kind, carrier)
    return side_by_side(low, high, next_low, next_high)


@triton.jit
def signs(words, carrier):
    """What unpacked bytes lack in bfloat16 beside their last seven bits: 64 - 128 s for a sign s,
    -128 for a negative byte and 64 added.
    """
    low, high = halves(((words << 8) & -0x7FFF8000) | (carrier - 0x800080), tl.bfloat16)
    next_low, next_high = halves((words & -0x7FFF8000) | (carrier - 0x800080), tl.bfloat16)
    return side_by_side(low, high, next_low, next_high)


@triton.jit
def place_of(a, WARPS: tl.constexpr, TILES: tl.constexpr):
    """(output, block) of entry a of a load: 8 lanes have 8 outputs, each warp its TILES of 16
    outputs and its block, and all second 8 outputs follow all first.
    """
    warp = a // 8 % WARPS
    return warp % TILES * 16 + a // (8 * WARPS) * 8 + a % 8, warp // TILES


@triton.jit
def load(places, at, below, EVEN: tl.constexpr):
    """Load from places, where not EVEN 0 unless at < below."""
    if EVEN:
        found = tl.load(places)
    else:
        found = tl.load(places, mask=at < below, other=0)
    return found


@triton.jit
def read_weights(
    words,
    scales,
    offsets,
    block,
    row,
    unit,
    blocks,
    groups,
    UNITS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    JOINED: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Load a block of each warp: its words from places `words`; the scales and the offsets of its
    UNITS units of rows, as words that hold both where JOINED; 0 outside.
    """
    held = load(words, block, blocks, EVEN)
    g = unit[:, None] + tl.arange(0, UNITS)[None, :]
    if PER_GROUP == 0:
        g, unit = g * 0, unit * 0
    else:
        g, unit = g // PER_GROUP, unit // PER_GROUP
    at = row[:, None] * groups + g
    # one mask for a block leaves its scales one load
    inside = unit[:, None] if WHOLE else g
    if JOINED:
        joined = scales.to(tl.pointer_type(tl.int32), bitcast=True)
        scale = load(joined + at, inside, groups, EVEN)
        offset = scale
    else:
        scale = load(scales + at, inside, groups, EVEN)
        offset = load(offsets + at, inside, groups, EVEN)
    return held, scale, offset


@triton.jit
def read_columns(x, k, width, PARTS: tl.constexpr, WIDE: tl.constexpr, EVEN: tl.constexpr):
    """Load the columns of a block from places `x`, four a lane, of which k is the first: its four
    parts, of nibbles each part's first 16 columns and the other 16.
    """
    found = ()
    for piece in tl.static_range(PARTS):
        at = piece * 16 // WIDE
        found += (load(x + at, (k + at)[:, None], width, EVEN),)  # type: ignore
    return found


@triton.jit
def apart(joined, kind: tl.constexpr):
    """Scales and offsets of `kind` that words hold, in float32."""
    if kind == tl.bfloat16:
        # the upper half of a float32
        low = (joined << 16).to(tl.float32, bitcast=True)
        high = (joined & -65536).to(tl.float32, bitcast=True)
    else:
        low, high = halves(joined, kind)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def columns_apart(tile, COUNT: tl.constexpr):
    """The COUNT columns of a tile [entries, COUNT], 1, 2 or 4, each [entries]."""
    if COUNT == 1:
        found = (tl.reshape(tile, [tile.shape[0]]),)
    elif COUNT == 2:
        found = tl.split(tile)
    else:
        even, odd = tl.split(tl.reshape(tile, [tile.shape[0], 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        found = first, second, third, fourth  # type: ignore
    return found


@triton.jit
def as_outputs(entries, WARPS: tl.constexpr):
    """Order entries [2 * WARPS * 8 * 4] of a load by warp, output and lane: [WARPS, 16, 4]."""
    found = tl.permute(tl.reshape(entries, [2, WARPS, 8, 4]), [1, 0, 2, 3])
    return tl.reshape(found, [WARPS, 16, 4])


@triton.jit
def beside_sums(scales, WARPS: tl.constexpr):
    """Lay loaded scales [entries] beside sums [WARPS, 16, 8 rows]: each lane has loaded those of
    the sums that it holds.
    """
    found = as_outputs(scales, WARPS)
    return tl.reshape(tl.join(found, found), [WARPS, 16, 8])


@triton.jit
def operand(loaded, kind: tl.constexpr, WARPS: tl.constexpr):
    """Lay 16 loaded columns of x, words of two or float32, as tensor cores take them:
    [WARPS, 16, 8 rows].
    """
    found = tl.reshape(loaded, [WARPS, 8, 4 * loaded.shape[1]])
    if kind != tl.float32:
        low, high = halves(found, kind)
        found = tl.reshape(tl.join(low, high), [WARPS, 8, 16])
    return tl.permute(found, [0, 2, 1])


@triton.jit
def constant(value: tl.constexpr, like):
    """A tensor of one value as weights [A, B, C] lie: joined as they are."""
    side: tl.constexpr = [like.shape[0], like.shape[1], like.shape[2] // 2]
    half = tl.full(side, value, tl.float32).to(like.dtype)
    return tl.reshape(tl.join(half, half), like.shape)


@triton.jit
def add_block(
    acc,
    weights,
    columns,
    carrier,
    scale_kind: tl.constexpr,
    kind: tl.constexpr,
    WARPS: tl.constexpr,
    UNITS: tl.constexpr,
    PARTS: tl.constexpr,
    JOINED: tl.constexpr,
    ADDED: tl.constexpr,
    OFFSETS: tl.constexpr,
):
    """Add the products of a block of each warp, summed within units, to acc [WARPS, 16, 8 rows].

    weights: its words, scales and offsets; columns: those of x.
    """
    EACH: tl.constexpr = 4 // UNITS  # parts of a unit
    parts = columns_apart(tl.reshape(weights[0], [64 * WARPS, 4]), 4)
    if JOINED:
        scale, offset = apart(weights[1], scale_kind)
    else:
        scale, offset = weights[1].to(tl.float32), weights[2].to(tl.float32)
    scale, offset = (
        columns_apart(scale, UNITS),
        columns_apart(offset - ADDED * scale, UNITS),
    )
    for unit in tl.static_range(UNITS):
        sums = tl.zeros(acc.shape, tl.float32)
        total = tl.zeros(acc.shape, tl.float32)
        for part in tl.static_range(EACH):
            words = as_outputs(parts[unit * EACH + part], WARPS)
            for half in tl.static_range(PARTS // 4):
                x = operand(columns[(unit * EACH + part) * (PARTS // 4) + half], kind, WARPS)
                values = unpacked(words, half, PARTS, kind, carrier)
                if OFFSETS:
                    total = tl.dot(constant(1.0, values), x, total, input_precision="ieee")
                elif ADDED > 0:
                    sums = tl.dot(constant(-ADDED, values), x, sums, input_precision="ieee")
                sums = tl.dot(values, x, sums, input_precision="ieee")
                if PARTS == 4 and kind == tl.bfloat16:
                    sums = tl.dot(signs(words, carrier), x, sums, input_precision="ieee")
        acc += sums * beside_sums(scale[unit], WARPS)
        if OFFSETS:
            acc += total * beside_sums(offset[unit], WARPS)
    return acc


@triton.jit
def places_of_words(WARPS: tl.constexpr, TILES: tl.constexpr):
    """Number the outputs of a program for each entry of a load of words."""
    place, _ = place_of(tl.arange(0, 16 * WARPS), WARPS, TILES)
    return place


@triton.jit
def places_of_scales(WARPS: tl.constexpr, TILES: tl.constexpr):
    """Number the outputs of a program for each entry of a load of scales."""
    place, _ = place_of(tl.arange(0, 64 * WARPS) // 4, WARPS, TILES)
    return place


@triton.jit
def rows_of_lanes(WARPS: tl.constexpr):
    """Number the 8 rows of x of a program for each entry of a load of columns."""
    return tl.arange(0, 32 * WARPS) // 4 % 8


@triton.jit
def sums_of_blocks(
    x,
    words,
    scales,
    offsets,
    rows_of_words,
    rows_of_scales,
    rows_of_x,
    inputs,
    blocks,
    groups,
    carrier,
    TILES: tl.constexpr,
    ALONG: tl.constexpr,
    SETS: tl.constexpr,
    UNITS: tl.constexpr,
    PARTS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    JOINED: tl.constexpr,
    ADDED: tl.constexpr,
    OFFSETS: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sum the products of 8 rows of x and 16 * TILES rows of the weight: [16 * TILES, 8], by the
    place of a row.

    rows_of_words, rows_of_scales, rows_of_x: rows of the weight and of x, for `places_of_words`,
    `places_of_scales` and `rows_of_lanes`. A row of x has sums of its own, so what another holds is
    of no matter. DEPENDENT: wait for the kernel before, behind the first loads of weights.
    """
    kind: tl.constexpr = x.dtype.element_ty
    scale_kind: tl.constexpr = scales.dtype.element_ty
    WARPS: tl.constexpr = ALONG * TILES
    STEP: tl.constexpr = ALONG * SETS
    if WHOLE and PER_GROUP == 1:
        groups = blocks * UNITS  # says that a block's scales are aligned
    place, block = place_of(tl.arange(0, 16 * WARPS), WARPS, TILES)
    words += (
        rows_of_words.to(tl.int64)[:, None] * (blocks * 16)
        + (block * 16)[:, None]
        + tl.arange(0, 16)[None, :]
    )
    block = block[:, None]
    # scales, for each of the four lanes that have sums of an output
    place, unit = place_of(tl.arange(0, 64 * WARPS) // 4, WARPS, TILES)
    row = rows_of_scales.to(tl.int64)
    unit *= UNITS
    # columns of x, 16 of each of 8 rows: four a lane
    WIDE: tl.constexpr = 1 if kind == tl.float32 else 2
    if WIDE == 2:
        x = x.to(tl.pointer_type(tl.int32), bitcast=True)
    BLOCK: tl.constexpr = 16 * PARTS // WIDE
    width = inputs // WIDE
    c = tl.arange(0, 32 * WARPS)
    k = c // 32 // TILES * BLOCK + c % 4 * (4 // WIDE)
    source = x + (rows_of_x * width + k)[:, None] + tl.arange(0, 4 // WIDE)[None, :]
    weights = ()
    for s in tl.static_range(SETS):
        at = s * ALONG
        weights += (  # type: ignore
            read_weights(
                words + 16 * at, scales, offsets, at + block, row, at * UNITS + unit, blocks,
                groups, UNITS, PER_GROUP, JOINED, WHOLE, EVEN,
            ),
        )  # fmt: skip
    wait_for_last_kernel(DEPENDENT)
    acc = tl.zeros([WARPS, 16, 8], tl.float32)
    for start in tl.range(STEP, blocks, STEP, num_stages=1):
        words += STEP * 16
        more = ()
        for s in tl.static_range(SETS):
            at = s * ALONG
            columns = read_columns(
                source + at * BLOCK, (start - STEP + at) * BLOCK + k, width, PARTS, WIDE, EVEN
            )
            acc = add_block(
                acc, weights[s], columns, carrier, scale_kind, kind, WARPS, UNITS, PARTS, JOINED,
                ADDED, OFFSETS,
            )  # fmt: skip
            more += (  # type: ignore
                read_weights(
                    words + 16 * at, scales, offsets, start + at + block, row,
                    (start + at) * UNITS + unit, blocks, groups, UNITS, PER_GROUP, JOINED, WHOLE,
                    EVEN,
                ),
            )  # fmt: skip
        weights = more
        source += STEP * BLOCK
    last = (tl.cdiv(blocks, STEP) - 1) * STEP
    for s in tl.static_range(SETS):
        at = s * ALONG
        columns = read_columns(
            source + at * BLOCK, (last + at) * BLOCK + k, width, PARTS, WIDE, EVEN
        )
        acc = add_block(
            acc, weights[s], columns, carrier, scale_kind, kind, WARPS, UNITS, PARTS, JOINED,
            ADDED, OFFSETS,
        )  # fmt: skip
    return tl.sum(tl.reshape(acc, [ALONG, 16 * TILES, 8]), 0)


@triton.jit(do_not_specialize=["rows", "carrier"])
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
    blocks,
    groups,
    carrier,
    HELD: tl.constexpr,
    ROWS: tl.constexpr,
    ALONG: tl.constexpr,
    SETS: tl.constexpr,
    UNITS: tl.constexpr,
    PARTS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    JOINED: tl.constexpr,
    ADDED: tl.constexpr,
    OFFSETS: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute HELD outputs of ROWS rows: grid (tiles of outputs, tiles of rows).

    A warp has 16 outputs and every ALONG-th block. Its loads are two-dimensional, so that a
    compiler's layout of them is the one that products take. The first SETS of a warp's blocks are
    loaded before the kernel waits for x.
    """
    kind: tl.constexpr = x.dtype.element_ty
    n, m, stored = outputs_of_program(outputs, HELD, GATED)
    TILES: tl.constexpr = m.shape[0] // 16
    WARPS: tl.constexpr = ALONG * TILES
    rows_of_words = row_of_place(places_of_words(WARPS, TILES), outputs, HELD, GATED)
    rows_of_scales = row_of_place(places_of_scales(WARPS, TILES), outputs, HELD, GATED)
    # rows beyond the last read the last one again, and are not stored
    sums = sums_of_blocks(
        x, words, scales, offsets,
        tl.minimum(rows_of_words, stored - 1),
        tl.minimum(rows_of_scales, stored - 1),
        tl.minimum(tl.program_id(1) * ROWS + rows_of_lanes(WARPS), rows - 1),
        inputs, blocks, groups, carrier,
        TILES, ALONG, SETS, UNITS, PARTS, PER_GROUP, JOINED, ADDED, OFFSETS, WHOLE, EVEN, DEPENDENT,
    )  # fmt: skip
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    store_rows(
        sums, bias, residual, out, n, m, r, rows, outputs, stored, kind, GATED, BIAS, RESIDUAL
    )
