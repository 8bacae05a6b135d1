"""Rows of kernels/rows/int4.py in Triton: tiles of odd numbers for products, and rows that are
rounded as they are stored, to the bit as kernels/rows/int4.py rounds them.
"""

from __future__ import annotations

from kernels.launch.triton import tl, triton


@triton.jit
def load_odd_keys(rows, at, stride, d, live, D: tl.constexpr, STEP: tl.constexpr):
    """Load the numbers of rows of K at [BLOCK], `stride` bytes apart: int32 [BLOCK, DP].

    rows: pointer to the first row of a head; d [DP]; live: mask [BLOCK], numbers beyond it and
    beyond D are -31. STEP, where D is a power of two: a byte is loaded once for both of its
    elements, which takes registers that a prompt's kernel has not.
    """
    row = starts(rows, at, stride)[:, None]
    run: tl.constexpr = D // 8
    if STEP and D == d.shape[0]:
        h = tl.arange(0, D // 2)
        code = tl.load(row + h[None, :], mask=live[:, None], other=0).to(tl.int32)
        upper = tl.load(row + (D // 2 + h % run)[None, :], mask=live[:, None], other=0)
        upper = upper.to(tl.int32) >> (h // run)[None, :]
        number = halves((code & 15) | (upper & 1) << 4, (code >> 4) | (upper & 16))
    else:
        inside = live[:, None] & (d < D)[None, :]
        upper = tl.load(row + (D // 2 + d % run)[None, :], mask=inside, other=0)
        upper = (upper.to(tl.int32) >> (d // run)[None, :]) & 1
        number = _nibbles(row, d, inside, D) | upper << 4
    return number * 2 - 31


@triton.jit
def load_odd_values(rows, at, stride, d, live, D: tl.constexpr, STEP: tl.constexpr):
    """Load number * factor of rows of V: int32 [BLOCK, DP], arguments as `load_odd_keys`."""
    row = starts(rows, at, stride)[:, None]
    # all factors of a row are one word; behind those of D <= 128 it holds the scale
    factors = tl.load(_words(rows, at, stride, D // 2), mask=live, other=0)
    if STEP and D == d.shape[0] and D > 32:
        groups: tl.constexpr = D // 64
        g = tl.arange(0, groups)
        place = g[:, None] * 32 + tl.arange(0, 32)[None, :]
        code = tl.load(row[:, :, None] + place[None], mask=live[:, None, None], other=0)
        code = code.to(tl.int32)
        one = ((factors[:, None] >> (g * 4)[None, :]) & 15) + 1
        other = ((factors[:, None] >> ((g + groups) * 4)[None, :]) & 15) + 1
        low = (code & 15) * (2 * one)[:, :, None] - (15 * one)[:, :, None]
        high = (code >> 4) * (2 * other)[:, :, None] - (15 * other)[:, :, None]
        number = halves(low, high)
    else:
        number = _nibbles(row, d, live[:, None] & (d < D)[None, :], D) * 2 - 15
        number = number * (((factors[:, None] >> (d // 32 * 4)[None, :]) & 15) + 1)
    return number


@triton.jit
def halves(low, high):
    """Put the elements of `high` [BLOCK, ..] behind those of `low`: [BLOCK, 2 N]."""
    both = tl.join(low, high)
    if len(both.shape) == 3:
        both = tl.permute(both, [0, 2, 1])
    else:
        both = tl.permute(both, [0, 3, 1, 2])
    return tl.reshape(both, [both.shape[0], both.numel // both.shape[0]])


@triton.jit
def odd_value_scales(rows, at, stride, live, D: tl.constexpr):
    """Load the scales of rows of V: float32 [BLOCK], 0 where not live. The upper half of a word is
    the bfloat16 that its float32 begins with.
    """
    place: tl.constexpr = D // 2 + (4 if D > 128 else 0)
    word = tl.load(_words(rows, at, stride, place), mask=live, other=0)
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def starts(rows, at, stride):
    """Point to the packed rows at [BLOCK]. All are multiples of 4 bytes, those of 8 bits a value of
    8, which the compiler cannot know.
    """
    return tl.multiple_of(rows + at * stride, 4 if rows.dtype.element_ty == tl.uint8 else 8)


@triton.jit
def _words(rows, at, stride, place):
    return (starts(rows, at, stride) + place).to(tl.pointer_type(tl.int32))


@triton.jit
def _nibbles(row, d, inside, D: tl.constexpr):
    """The nibble of every element: int32 [BLOCK, DP]."""
    packed = tl.load(row + (d % (D // 2))[None, :], mask=inside, other=0)
    shift = tl.where(d < D // 2, 0, 4)
    return (packed.to(tl.int32) >> shift[None, :]) & 15


# ---------------------------------------------------------------- rounding


@triton.jit
def _inverse(scale):
    """1 / scale, rounded as IEEE rounds it; 0 of 0 and of NaN."""
    return tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)


@triton.jit
def _steps(x, inverse):
    steps = tl.abs(x) * inverse * 128
    return tl.where(steps >= 0, steps, 0.0).to(tl.int32)


@triton.jit
def _level(x, inverse, TOP: tl.constexpr):
    """Levels, and squared errors in steps, of x [N]: see kernels/rows/int4.py."""
    steps = _steps(x, inverse)
    level = tl.minimum(steps >> 8, TOP // 2)
    off = steps - (256 * level + 128)
    return level, off * off


@triton.jit
def _largest(first, second):
    """The largest magnitude of two vectors, NaN where there is one."""
    most = tl.maximum(tl.max(tl.abs(first), 0), tl.max(tl.abs(second), 0))
    broken = tl.max((first != first).to(tl.int32), 0) + tl.max((second != second).to(tl.int32), 0)
    return tl.where(broken > 0, float("nan"), most)


@triton.jit
def store_odd_key(to, low, high, h, HALF: tl.constexpr):
    """Store one transformed row of K, given its halves [HP] float32, zero beyond HALF."""
    most = _largest(low, high)
    real = h < HALF
    for share in tl.static_range(16, 12, -1):
        tried = most * (share / 16 / 31)
        tried = tl.where(tried < 1.1754943508222875e-38, 0.0, tried)
        inverse = _inverse(tried)
        first, off_first = _level(low, inverse, 31)
        second, off_second = _level(high, inverse, 31)
        cost = tl.sum(tl.where(real, off_first + off_second, 0), 0).to(tl.float32)
        cost = cost * (share * share)
        if share == 16:
            scale, least = tried, cost
            best_first, best_second = first, second
        else:
            better = cost < least
            scale = tl.where(better, tried, scale)
            least = tl.where(better, cost, least)
            best_first = tl.where(better, first, best_first)
            best_second = tl.where(better, second, best_second)
    one = tl.where(low < 0, 15 - best_first, best_first + 16)
    other = tl.where(high < 0, 15 - best_second, best_second + 16)
    tl.store(to + h, ((one & 15) | ((other & 15) << 4)).to(tl.uint8), mask=real)
    # byte i of the upper bits takes bit j from element i + j * D/8: four of each half
    eighth: tl.constexpr = HALF // 4
    count: tl.constexpr = low.shape[0] // 4
    i = tl.arange(0, count)
    bits = ((one >> 4) << (h // eighth)) + ((other >> 4) << (h // eighth + 4))
    mine = (h % eighth)[:, None] == i[None, :]
    upper = tl.sum(tl.where(mine & real[:, None], bits[:, None], 0), 0)
    tl.store(to + HALF + i, upper.to(tl.uint8), mask=i < eighth)
    tl.store((to + HALF + eighth).to(tl.pointer_type(tl.float32)), scale)


@triton.jit
def store_odd_value(to, low, high, h, HALF: tl.constexpr):
    """Store one row of V, given its halves [HP] float32, zero beyond HALF."""
    groups: tl.constexpr = HALF // 16
    scale = _largest(low, high) * (1.0 / 120)
    bits = scale.to(tl.int32, bitcast=True)
    narrow = ((bits + 32768) & -65536).to(tl.float32, bitcast=True)
    narrow = tl.where(scale < 1.1754943508222875e-38, 0.0, narrow)
    scale = tl.where(scale < float("inf"), narrow, scale)
    inverse = _inverse(scale)
    # elements of a group may lie in both halves; at most 8 groups
    g = tl.arange(0, 8)
    in_first = ((h // 32)[:, None] == g[None, :]) & (h < HALF)[:, None]
    in_second = (((h + HALF) // 32)[:, None] == g[None, :]) & (h < HALF)[:, None]
    reach = tl.maximum(
        tl.max(tl.where(in_first, _steps(low, inverse)[:, None], 0), 0),
        tl.max(tl.where(in_second, _steps(high, inverse)[:, None], 0), 0),
    )
    start = tl.minimum(tl.maximum((reach + 1919) // 1920, 1), 8)
    for less in tl.static_range(3):
        tried = tl.maximum(start - less, 1)
        share = tl.div_rn(inverse, tried.to(tl.float32))
        one = tl.sum(tl.where(in_first, share[None, :], 0.0), 1)
        other = tl.sum(tl.where(in_second, share[None, :], 0.0), 1)
        first, off_first = _level(low, one, 15)
        second, off_second = _level(high, other, 15)
        cost = tl.sum(tl.where(in_first, off_first[:, None], 0), 0)
        cost += tl.sum(tl.where(in_second, off_second[:, None], 0), 0)
        found = cost.to(tl.float32) * (tried * tried).to(tl.float32)
        if less == 0:
            factor, least = tried, found
            best_first, best_second = first, second
        else:
            better = found < least
            factor = tl.where(better, tried, factor)
            least = tl.where(better, found, least)
            better_first = tl.sum((in_first & better[None, :]).to(tl.int32), 1) > 0
            better_second = tl.sum((in_second & better[None, :]).to(tl.int32), 1) > 0
            best_first = tl.where(better_first, first, best_first)
            best_second = tl.where(better_second, second, best_second)
    code = tl.where(low < 0, 7 - best_first, best_first + 8)
    code |= tl.where(high < 0, 7 - best_second, best_second + 8) << 4
    tl.store(to + h, code.to(tl.uint8), mask=h < HALF)
    held = tl.sum(tl.where(g < groups, (factor - 1) << (4 * g), 0), 0)
    upper = scale.to(tl.int32, bitcast=True) & -65536
    words = (to + HALF).to(tl.pointer_type(tl.int32))
    if groups > 4:
        tl.store(words, held)
        tl.store(words + 1, upper)
    else:
        tl.store(words, held | upper)
