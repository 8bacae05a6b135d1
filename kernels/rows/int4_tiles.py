"""Rows of kernels/rows/int4.py in Triton: tiles for products, and rows that are rounded as they are
stored, to the bit as kernels/rows/int4.py rounds them.

A tile's elements lie in another order than a row's: column c holds element c / 2, or where c is odd
element c / 2 + D / 2. `columns` tells it; queries are loaded by it, and sums of V stored by it.
Then whatever unpacks is a mask of whole registers, and nothing moves from thread to thread.
"""

from __future__ import annotations

from kernels.launch.triton import tl, triton


@triton.jit
def columns(rows, D: tl.constexpr, DP: tl.constexpr):
    """The element [DP] that every column of a tile of `rows` has; D and more beyond the last."""
    c = tl.arange(0, DP)
    if rows.dtype.element_ty == tl.uint8:
        c = tl.where(c < D, c // 2 + c % 2 * (D // 2), c)
    return c


@triton.jit
def load_planes(rows, at, stride, live, D: tl.constexpr):
    """Load the three planes of rows of K at [BLOCK], `stride` bytes apart: int8 [BLOCK, QP] each, 0
    beyond D / 4 and where not `live`. Tensor cores take 32 numbers of 8 bits at a time, so QP is no
    less.
    """
    quarter: tl.constexpr = D // 4
    i = tl.arange(0, quarter_width(D))
    row = starts(rows, at, stride).to(tl.pointer_type(tl.int8))[:, None] + i[None, :]
    inside = live[:, None] & (i < quarter)[None, :]
    one = tl.load(row, mask=inside, other=0)
    two = tl.load(row + quarter, mask=inside, other=0)
    three = tl.load(row + 2 * quarter, mask=inside, other=0)
    return one, two, three


@triton.constexpr_function
def quarter_width(head_dim):
    """Columns of a plane: a power of two, 32 at least."""
    return max(32, 1 << (head_dim // 4 - 1).bit_length())


@triton.jit
def key_tile(rows, at, stride, live, like, D: tl.constexpr, DP: tl.constexpr):
    """Load the numbers of rows of K: [BLOCK, DP] in the order of `columns`, in like's dtype."""
    quarter: tl.constexpr = D // 4
    i = tl.arange(0, DP // 4)
    row = starts(rows, at, stride)[:, None] + i[None, :]
    inside = live[:, None] & (i < quarter)[None, :]
    one = tl.load(row, mask=inside, other=0).to(tl.int16)
    two = tl.load(row + quarter, mask=inside, other=0).to(tl.int16)
    three = tl.load(row + 2 * quarter, mask=inside, other=0).to(tl.int16)
    four = (one >> 6 << 4 | two >> 6 << 2 | three >> 6) ^ 42
    return quarters_joined(
        carried(one & 63, 32, like),
        carried(two & 63, 32, like),
        carried(three & 63, 32, like),
        carried(four, 32, like),
    )


@triton.jit
def value_words(rows, at, stride, live, D: tl.constexpr, DP: tl.constexpr):
    """Load rows of V as words of four elements: int16 [BLOCK, DP / 4], 0 beyond D / 4."""
    i = tl.arange(0, DP // 4)
    row = starts(rows, at, stride).to(tl.pointer_type(tl.int16))[:, None] + i[None, :]
    return tl.load(row, mask=live[:, None] & (i < D // 4)[None, :], other=0)


@triton.jit
def value_quarter(words, number: tl.constexpr, like):
    """Unpack nibble `number` of words: its values, from -8 to 7, in like's dtype."""
    return carried((words >> (4 * number)) & 15, 8, like)


@triton.jit
def carried(code, less: tl.constexpr, like):
    """Convert codes of at most 7 bits, int16, less a whole number, to like's dtype. In 16 bits they
    become the last bits of 128 or 1,024, as in kernels/quant/gemv.py, and that is taken off again:
    two at a time, and exact.
    """
    # by way of float32: the interpreter knows no constant of bfloat16
    if like.dtype == tl.bfloat16:
        found = (code | 0x4300).to(tl.bfloat16, bitcast=True)
        found -= tl.full([1], 128 + less, tl.float32).to(tl.bfloat16)
    elif like.dtype == tl.float16:
        found = (code | 0x6400).to(tl.float16, bitcast=True)
        found -= tl.full([1], 1024 + less, tl.float32).to(tl.float16)
    else:
        found = (code - less).to(like.dtype)
    return found


@triton.jit
def quarters_joined(one, two, three, four):
    """Put columns 4 i, 4 i + 1, 4 i + 2 and 4 i + 3 [N, W] side by side: [N, 4 W]."""
    both = tl.join(tl.join(one, three), tl.join(two, four))
    return tl.reshape(both, [both.shape[0], both.numel // both.shape[0]])


@triton.jit
def starts(rows, at, stride):
    """Point to the packed rows at [BLOCK]. All are multiples of 4 bytes, those of 8 bits a value of
    8, which the compiler cannot know.
    """
    return tl.multiple_of(rows + at * stride, 4 if rows.dtype.element_ty == tl.uint8 else 8)


# ---------------------------------------------------------------- rounding


@triton.jit
def _numbers(x, inverse, LOW: tl.constexpr):
    """Numbers, and squared errors in steps, of x [N]: see kernels/rows/int4.py."""
    steps = x * inverse * 128
    steps = tl.where(tl.abs(steps) < float("inf"), steps, 0.0).to(tl.int32)
    number = tl.minimum(tl.maximum((steps + 64) >> 7, -LOW), LOW - 1)
    off = steps - 128 * number
    return number, off * off


@triton.jit
def rounded_halves(low, high, LOW: tl.constexpr, LAST: tl.constexpr):
    """Round a row whose halves [HP] float32 are zero beyond D / 2: numbers from -LOW to LOW - 1 of
    either half, and the scale. Shares from 16 down to LAST are tried.
    """
    top = tl.maximum(tl.max(low, 0), tl.max(high, 0))
    bottom = tl.minimum(tl.min(low, 0), tl.min(high, 0))
    broken = tl.max((low != low).to(tl.int32), 0) + tl.max((high != high).to(tl.int32), 0)
    most = tl.where(broken > 0, float("nan"), tl.maximum(top, -bottom))
    sign = tl.where(top > -bottom, -1.0, 1.0)
    for share in tl.static_range(16, LAST - 1, -1):
        tried = most * (share / 16 / LOW)
        tried = tl.where(tried < 1.1754943508222875e-38, 0.0, tried) * sign
        used = tl.abs(tried) > 0
        # rounded as IEEE rounds it; 0 of 0 and of NaN
        inverse = tl.where(used, tl.div_rn(1.0, tl.where(used, tried, 1.0)), 0.0)
        first, off_first = _numbers(low, inverse, LOW)
        second, off_second = _numbers(high, inverse, LOW)
        cost = tl.sum(off_first + off_second, 0).to(tl.float32) * (share * share)
        if share == 16:
            scale, least = tried, cost
            one, other = first, second
        else:
            better = cost < least
            scale = tl.where(better, tried, scale)
            least = tl.where(better, cost, least)
            one = tl.where(better, first, one)
            other = tl.where(better, second, other)
    return one, other, scale


@triton.jit
def store_key(to, low, high, HALF: tl.constexpr):
    """Store one transformed row of K, given its halves [HP] float32, zero beyond HALF."""
    one, other, scale = rounded_halves(low, high, 32, 16)
    quarter: tl.constexpr = HALF // 2
    pairs: tl.constexpr = [low.shape[0] // 2, 2]
    first, third = tl.split(tl.reshape(one + 32, pairs))
    second, fourth = tl.split(tl.reshape(other + 32, pairs))
    fourth = fourth ^ 42
    i = tl.arange(0, low.shape[0] // 2)
    tl.store(to + i, (first | fourth >> 4 << 6).to(tl.uint8), mask=i < quarter)
    tl.store(to + quarter + i, (second | (fourth >> 2 & 3) << 6).to(tl.uint8), mask=i < quarter)
    tl.store(to + 2 * quarter + i, (third | (fourth & 3) << 6).to(tl.uint8), mask=i < quarter)
    tl.store((to + 3 * quarter).to(tl.pointer_type(tl.float32)), scale)


@triton.jit
def store_value(to, low, high, h, HALF: tl.constexpr):
    """Store one transformed row of V, given its halves [HP] float32, zero beyond HALF."""
    one, other, scale = rounded_halves(low, high, 8, 13)
    tl.store(to + h, (one + 8 | (other + 8) << 4).to(tl.uint8), mask=h < HALF)
    tl.store((to + HALF).to(tl.pointer_type(tl.float32)), scale)
