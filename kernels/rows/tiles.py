"""Tiles of a bank's rows in Triton: what a kernel that reads or writes rows of any form
(kernels/rows/forms.py) calls. The element type of a pointer says the form, so that a kernel has one
text.
"""

from __future__ import annotations

from kernels.launch.shapes import softmax_step, softmax_weights
from kernels.launch.triton import tl, triton
from kernels.rows.hadamard import row_factor, run_length, transformed_halves
from kernels.rows.int4_tiles import (
    key_tile,
    load_planes,
    quarter_width,
    quarters_joined,
    starts,
    store_key,
    store_value,
    value_quarter,
    value_words,
)


@triton.jit
def load_tile(rows, at, stride, d, inside, like, STEP: tl.constexpr = False):
    """Load elements d of rows of floats, or values of a byte each in the dtype of `like`:
    [BLOCK, DP], 0 where not inside.
    """
    if packed(rows.dtype):
        place = starts(rows, at, stride)[:, None] + d[None, :]
    else:
        place = rows + at[:, None] * stride + d[None, :]
    if rows.dtype.element_ty == tl.float8e4nv:
        # as bytes: the interpreter knows no zero of 8 bits
        tile = tl.load(place.to(tl.pointer_type(tl.uint8)), mask=inside, other=0)
        tile = tile.to(tl.float8e4nv, bitcast=True)
    else:
        tile = tl.load(place, mask=inside, other=0)
    if STEP and rows.dtype.element_ty == tl.int8:
        # 1.5 instructions for an element; by the compiler's own road, which takes fewer registers,
        # 3.75
        tile = tile.to(tl.int32)
    if packed(rows.dtype):
        # by way of float32: the interpreter knows no other road to bfloat16
        tile = tile.to(tl.float32).to(like.dtype)
    return tile


@triton.jit
def load_keys(rows, at, stride, d, live, like, D: tl.constexpr):
    """Load a tile [BLOCK, DP] of K rows at [BLOCK], of `stride` elements each, for the product with
    the queries, which `stored_queries` has transformed; of packed rows the values, exact in 16
    bits, whose scales `scaled_logits` applies.

    rows: pointer to the first row of a head; d [DP]: `columns` of these rows; live: mask [BLOCK],
    rows beyond it are any finite values; like: a tensor of the queries' dtype, in which packed rows
    are returned.
    """
    if rows.dtype.element_ty == tl.uint8:
        tile = key_tile(rows, at, stride, live, like, D, d.shape[0])
    else:
        tile = load_tile(rows, at, stride, d, live[:, None] & (d < D)[None, :], like)
    return tile


@triton.jit
def key_product(rows, tile):
    """Multiply queries [M, DP] by a tile of `load_keys` [BLOCK, DP]: float32 [M, BLOCK]. float32
    queries of a tile in 16 bits go in as two numbers of 16 bits each, their value and what it
    leaves, so that tensor cores multiply them.
    """
    if rows.dtype == tl.float32 and tile.dtype != tl.float32:
        high = rows.to(tile.dtype)
        low = (rows - high.to(tl.float32)).to(tile.dtype)
        found = tl.dot(high, tl.trans(tile), input_precision="ieee")
        found += tl.dot(low, tl.trans(tile), input_precision="ieee")
    else:
        found = tl.dot(rows, tl.trans(tile), input_precision="ieee")
    return found


@triton.jit
def digits(rows, inverse):
    """Three digits of 8 bits, the highest first, of numbers of 24 bits: rows [M, N] times inverse
    [M]; 0 of what is not finite.
    """
    number = tl.floor(rows * inverse[:, None] + 0.5)
    number = tl.where(tl.abs(number) <= 8330000.0, number, 0.0).to(tl.int32)
    low = (number << 24) >> 24
    number = (number - low) >> 8
    middle = (number << 24) >> 24
    return ((number - middle) >> 8).to(tl.int8), middle.to(tl.int8), low.to(tl.int8)


@triton.jit
def step_queries(q, at, live, d, keys, scale, D: tl.constexpr):
    """Load a step's queries at q + at [M], 0 where not `live`, for `step_logits` with rows of K
    like `keys`: [M, DP]. d [DP]: `columns` of the keys. Where those are whole numbers, a query
    becomes three digits of 8 bits, a number of 24 bits of which its largest element is the top, and
    a unit that has `scale` in it: nothing is lost beside float32.
    """
    inside = live[:, None] & (d < D)[None, :]
    rows = tl.load(q + at[:, None] + d[None, :], mask=inside, other=0.0)
    if whole(keys.dtype):
        reach = tl.maximum(tl.max(tl.abs(rows), 1), 1e-30)
        # an element that is not finite: its sum, and so every logit, is NaN
        unit = reach * (scale / 127) + tl.sum(rows * 0.0, 1)
        inverse = 8323072.0 / reach
        if keys.dtype.element_ty == tl.uint8:
            queries = quarter_digits(q, at, live, inverse, D), unit
        else:
            queries = digits(rows, inverse), unit
    else:
        queries = rows
    return queries


@triton.jit
def quarter_digits(q, at, live, inverse, D: tl.constexpr):
    """Digits of the columns 4 i, 4 i + 1, 4 i + 2 and 4 i + 3 of queries apart, as planes of K have
    them.
    """
    i = tl.arange(0, quarter_width(D))
    inside = live[:, None] & (i < D // 4)[None, :]
    place = q + at[:, None] + 2 * i[None, :]
    one = tl.load(place, mask=inside, other=0.0)
    two = tl.load(place + D // 2, mask=inside, other=0.0)
    three = tl.load(place + 1, mask=inside, other=0.0)
    four = tl.load(place + D // 2 + 1, mask=inside, other=0.0)
    return digits(one, inverse), digits(two, inverse), digits(three, inverse), digits(four, inverse)


@triton.jit
def load_step_keys(rows, at, stride, d, live, like, D: tl.constexpr):
    """Load a tile as `load_keys` does; of whole numbers as int8, for `step_logits`."""
    if rows.dtype.element_ty == tl.uint8:
        tile = load_planes(rows, at, stride, live, D)
    elif rows.dtype.element_ty == tl.int8:
        inside = live[:, None] & (d < D)[None, :]
        tile = tl.load(starts(rows, at, stride)[:, None] + d[None, :], mask=inside, other=0)
    else:
        tile = load_tile(rows, at, stride, d, live[:, None] & (d < D)[None, :], like)
    return tile


@triton.jit
def step_logits(queries, tile, keys, scale):
    """Multiply queries of `step_queries` by a tile of `load_step_keys` of rows like `keys`, and by
    the same scale: float32 [M, BLOCK]. Sums of digits are whole numbers below 2^31, for heads of up
    to 256.
    """
    if keys.dtype.element_ty == tl.uint8:
        quarters, unit = queries
        high = plane_sums(quarters, tile, 0).to(tl.float32)
        middle = plane_sums(quarters, tile, 1).to(tl.float32)
        low = plane_sums(quarters, tile, 2).to(tl.float32)
        found = (high + (middle + low * (1.0 / 256)) * (1.0 / 256)) * (unit / 64)[:, None]
    elif keys.dtype.element_ty == tl.int8:
        parts, unit = queries
        high, middle, low = parts
        turned = tl.trans(tile)
        first = tl.dot(high, turned, out_dtype=tl.int32).to(tl.float32)
        rest = tl.dot(middle, turned, out_dtype=tl.int32) * 256
        rest += tl.dot(low, turned, out_dtype=tl.int32)
        found = (first + rest.to(tl.float32) * (1.0 / 65536)) * unit[:, None]
    else:
        found = key_product(queries, tile) * scale
    return found


@triton.jit
def plane_sums(quarters, planes, number: tl.constexpr):
    """Multiply digit `number` of queries' quarters by the numbers of planes of K: 64 times int32
    [M, BLOCK]. The lower six bits of a byte are a number and 32; the upper two, signed, are digits
    of the fourth number, less 10.
    """
    one, two, three = tl.trans(planes[0]), tl.trans(planes[1]), tl.trans(planes[2])
    first, second, third, fourth = (
        quarters[0][number],
        quarters[1][number],
        quarters[2][number],
        quarters[3][number],
    )
    less = -32 * (row_sums(first) + row_sums(second) + row_sums(third)) + 10 * row_sums(fourth)
    found = tl.zeros([one.shape[1]], tl.int32)[None, :] + less[:, None]
    found = tl.dot(first, one & 63, found, out_dtype=tl.int32)
    found = tl.dot(second, two & 63, found, out_dtype=tl.int32)
    found = tl.dot(third, three & 63, found, out_dtype=tl.int32)
    found = tl.dot(fourth, one & -64, found * 4, out_dtype=tl.int32)
    found = tl.dot(fourth, two & -64, found * 4, out_dtype=tl.int32)
    return tl.dot(fourth, three & -64, found * 4, out_dtype=tl.int32)


@triton.jit
def row_sums(digits):
    """Sum whole numbers of 8 bits [M, N] as 32: [M]."""
    return tl.sum(digits.to(tl.int32), 1)


@triton.constexpr_function
def whole(dtype):
    """Whether rows of a pointer's dtype are whole numbers: a constant of the compiled kernel."""
    return dtype.element_ty in (tl.int8, tl.uint8)


@triton.constexpr_function
def packed(dtype):
    """Whether rows of a pointer's dtype are packed: a constant of the compiled kernel."""
    return dtype.element_ty in (tl.int8, tl.uint8, tl.float8e4nv)


@triton.jit
def key_scales(rows, at, stride, live, D: tl.constexpr):
    """Load the scales [BLOCK] of packed rows of K; 0 where not live."""
    size: tl.constexpr = D // 4 * 3 if rows.dtype.element_ty == tl.uint8 else D
    place = (starts(rows, at, stride) + size).to(tl.pointer_type(tl.float32))
    return tl.load(place, mask=live, other=0.0)


@triton.jit
def value_scales(rows, at, stride, live, D: tl.constexpr):
    """Load the scales [BLOCK] of packed rows of V; 0 where not live."""
    size: tl.constexpr = D // 2 if rows.dtype.element_ty == tl.uint8 else D
    place = (starts(rows, at, stride) + size).to(tl.pointer_type(tl.float32))
    return tl.load(place, mask=live, other=0.0)


@triton.jit
def scaled_logits(logits, rows, at, stride, live, D: tl.constexpr):
    """Apply the scales of the K rows at [BLOCK] to their logits [M, BLOCK], if they are packed."""
    if packed(rows.dtype):
        logits = logits * key_scales(rows, at, stride, live, D)[None, :]
    return logits


@triton.jit
def load_values(rows, at, stride, d, live, like, D: tl.constexpr, SCALED: tl.constexpr):
    """Load a tile of V rows, arguments as `load_keys`. Packed rows come as their values, for
    `softmax_tile`; with SCALED, and in float16, as value * scale, rounded once: weights times a
    scale would be subnormal in float16. Of 4 bits without SCALED four tiles [BLOCK, DP / 4].
    """
    if rows.dtype.element_ty == tl.uint8:
        words = value_words(rows, at, stride, live, D, d.shape[0])
        if SCALED:
            scale = value_scales(rows, at, stride, live, D)
            tile = quarters_joined(
                scaled(value_quarter(words, 0, like), scale),
                scaled(value_quarter(words, 1, like), scale),
                scaled(value_quarter(words, 2, like), scale),
                scaled(value_quarter(words, 3, like), scale),
            )
        else:
            tile = words
    else:
        tile = load_tile(rows, at, stride, d, live[:, None] & (d < D)[None, :], like, not SCALED)
        if packed(rows.dtype) and (SCALED or like.dtype == tl.float16):
            tile = scaled(tile, value_scales(rows, at, stride, live, D))
    return tile


@triton.jit
def scaled(values, scale):
    """Multiply values [N, W] by scales [N] in float32, and round them to their dtype."""
    return (values.to(tl.float32) * scale[:, None]).to(values.dtype)


@triton.jit
def softmax_tile(scores, values, rows, at, stride, live, m, total, acc, like, D: tl.constexpr):
    """Take a tile of `load_values` without SCALED into an online softmax, as `softmax_step` does:
    scales of packed rows go with the weights. Of few queries those are fewer than the values.
    """
    if rows.dtype.element_ty == tl.uint8:
        scale = value_scales(rows, at, stride, live, D)
        m, total, weights, shrink = softmax_weights(scores, m, total)
        if like.dtype != tl.float16:
            weights = weights * scale[None, :]
        weights = weights.to(like.dtype)
        acc = acc * shrink[:, None] + quarters_joined(
            value_sums(weights, values, 0, scale, like),
            value_sums(weights, values, 1, scale, like),
            value_sums(weights, values, 2, scale, like),
            value_sums(weights, values, 3, scale, like),
        )
    elif packed(rows.dtype) and values.dtype != tl.float16:
        scale = value_scales(rows, at, stride, live, D)
        m, total, acc = softmax_step(scores, values, m, total, acc, scale)
    else:
        m, total, acc = softmax_step(scores, values, m, total, acc)
    return m, total, acc


@triton.jit
def value_sums(weights, words, number: tl.constexpr, scale, like):
    """Multiply weights [M, BLOCK] by nibble `number` of words of V [BLOCK, W], in float16 by that
    times its scale: float32 [M, W].
    """
    values = value_quarter(words, number, like)
    if like.dtype == tl.float16:
        values = scaled(values, scale)
    return tl.dot(weights, values, input_precision="ieee")


@triton.jit
def row_scale(most, TOP: tl.constexpr):
    """Return (scale, its reciprocal) of a row whose largest magnitude is `most`, which becomes TOP:
    see `pack`.
    """
    scale = most.to(tl.float32) * (1.0 / TOP)
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
    return scale, tl.where(scale > 0, 1.0 / tl.where(scale > 0, scale, 1.0), 0.0)


@triton.jit
def float8_bits(x):
    """Round x, at most 448 in magnitude, to float8_e4m3fn, halves to even: its bits, int32. As
    whole numbers, since the interpreter rounds otherwise than torch and the hardware do.
    """
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    # four bits of the mantissa are left, and the exponent begins at -7 instead of -127
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    # below 2^-6 in steps of 2^-9, which the sum with 2^23 rounds to
    small = (tl.abs(x) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 255
    return tl.where(tl.abs(x) < 0.015625, small, normal) | tl.where(x < 0, 128, 0)


@triton.jit
def store_row(
    to,
    first,
    second,
    h,
    HALF: tl.constexpr,
    B: tl.constexpr,
    FACTOR: tl.constexpr,
    ODD: tl.constexpr = 0,
    VALUE: tl.constexpr = False,
):
    """Store one head's new row in the form of the bank `to`, given its halves [HP], which are zero
    beyond HALF; h [HP]: 0, 1, ... B, FACTOR: those of `transform_of`, by which rows of K are
    transformed, and of V in 4 bits. ODD: 1 where the second half of a row of floats is one shorter.
    VALUE: a row of V.
    """
    if (to.dtype.element_ty == tl.int8) | (to.dtype.element_ty == tl.float8e4nv):
        low, high = first.to(tl.float32), second.to(tl.float32)
        if not VALUE:
            low, high = transformed_halves(first, second, B, FACTOR)
        most = tl.maximum(tl.max(tl.abs(low), 0), tl.max(tl.abs(high), 0))
        whole: tl.constexpr = to.dtype.element_ty == tl.int8
        scale, inverse = row_scale(most, 127 if whole else 448)
        if whole:
            low, high = tl.floor(low * inverse + 0.5), tl.floor(high * inverse + 0.5)
        else:
            low, high = float8_bits(low * inverse), float8_bits(high * inverse)
        values = to.to(tl.pointer_type(tl.int8 if whole else tl.uint8))
        tl.store(values + h, low.to(values.dtype.element_ty), mask=h < HALF)
        tl.store(values + HALF + h, high.to(values.dtype.element_ty), mask=h < HALF)
        tail = (to + 2 * HALF).to(tl.pointer_type(tl.float32))
        tl.store(tail, scale)
        tl.store(tail + 1, 0.0)
    elif to.dtype.element_ty == tl.uint8:
        low, high = transformed_halves(first, second, B, FACTOR)
        if VALUE:
            store_value(to, low, high, h, HALF)
        else:
            store_key(to, low, high, HALF)
    else:
        tl.store(to + h, first.to(to.dtype.element_ty), mask=h < HALF)
        tl.store(to + HALF + h, second.to(to.dtype.element_ty), mask=h < HALF - ODD)


def transform_of(head_dim: int) -> dict[str, int]:
    """What a kernel that stores rows of K takes to transform them."""
    return dict(B=run_length(head_dim), FACTOR=row_factor(head_dim))
