"""Scores as integers of the same order, and the histogram of their first digit: what the top-k's
radix select shares with the kernels that write the scores.
"""

from __future__ import annotations

from kernels.launch.triton import tl, triton

BINS = 256 + 4096 + 4096  # of the three digits of one row: bits 31..24, 23..12 and 11..0


@triton.jit
def ordered(scores):
    """Turn float32 scores into uint32 of the same order, NaN as -inf and -0 as +0; integers, so
    that no compiler mode flushes denormals.
    """
    bits = scores.to(tl.uint32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0xFF800000, bits).to(tl.uint32)
    bits = tl.where(bits == 0x80000000, 0, bits).to(tl.uint32)
    return tl.where(bits >= 0x80000000, bits ^ 0xFFFFFFFF, bits ^ 0x80000000).to(tl.uint32)


@triton.jit
def count_first_digit(hist, x, inside):
    """Add the first digits of a tile of ordered scores to a histogram of 256 bins in memory.

    Softmaxed scores fall into some twenty bins of two octaves each, so a tile adds some twenty
    atomics, whatever its size.
    """
    tile = tl.histogram((x >> 24).to(tl.int32), 256, mask=inside)
    tl.atomic_add(hist + tl.arange(0, 256), tile, mask=tile > 0, sem="relaxed")
