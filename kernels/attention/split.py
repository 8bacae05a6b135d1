"""Shared by the dense and the sparse decode kernel (split-K flash-decoding): launch shapes, the
softmax step of a tile. kernels/attention/merge.py merges the splits.

K and V are visited in fixed-length splits at absolute boundaries and merged in a fixed order. An
output, and the log-sum-exp that a selection hangs on, then depends on the rows and the card alone:
not on the capacity or the grid. A dense layer's depends on no card either.
"""

from __future__ import annotations

import torch

from kernels.launch.shapes import DENSE_SPLIT, PROCESSORS, Config, power_of_two
from kernels.launch.triton import tl, triton

# splits merged by one program; more merge in two levels. A dense layer has hundreds: all chunks but
# the last merge while others still attend
MERGE_CHUNK = 16
# a sparse layer's 37 (2048 tokens, 8 kv heads) merge in one level
SPARSE_CHUNK = 64
# floats of a program's tile while it merges
MERGE_TILE = 4096
# programs of the sparse kernel for each SM
PER_PROCESSOR = 2
# under a head wider than this a program takes at most DEALT query heads, where all of them share
# one K/V head (latent attention): the accumulator of more would not fit the registers
WIDE_HEAD, DEALT = 256, 16
# tail rows that the sparse grid is sized for (default tail: below 320); longer ones still work
TAIL_ROOM = 512


def decode_config(
    queries: int,
    group: int,
    head_dim: int,
    itemsize: int,
    tile_bytes: int,
    rows: torch.dtype | None = None,
) -> Config:
    """Choose the launch shape of a decode kernel.

    One K tile holds `tile_bytes`. Two tiles of K and V in flight take four times that in shared
    memory: 64 KB of 16 KB tiles leaves three programs on an H100 or H200 and one on sm_89 with its
    99 KB. Queries are packed up to 64 rows and 16 KB (the accumulator then stays at 64 registers a
    thread); past that, a second program reads the same rows, from L2. In float32 the products run
    in registers, not in tensor cores: 32 rows. rows: the dtype of packed rows. Rows of 6 and 4
    bits are multiplied by quarters, of which all four warps share 32 columns or more.
    """
    # tensor cores take 32 numbers of 8 bits at a time
    least = 16 if rows is None else 128 if rows == torch.uint8 else 32
    dim = max(least, power_of_two(head_dim))
    most = min(64 if itemsize < 4 else 32, 16384 // (dim * itemsize))
    packed = max(1, min(queries, most // group))
    if dim > 512:
        # 16 rows of 1024 are 64 registers under 8 warps; two tiles of 32 KB at a time fit 99 KB
        return Config(16, max(16, power_of_two(group)), dim, warps=8, stages=2, queries=1)
    block = min(64 if packed * group > 32 else 128, max(16, tile_bytes // (dim * itemsize)))
    return Config(
        block, max(16, power_of_two(packed * group)), dim, warps=4, stages=3, queries=packed
    )


def dealt_heads(heads: int, kv_heads: int, head_dim: int) -> int:
    """Count the K/V heads that programs see: more than the one that there is where it is wider than
    WIDE_HEAD, so that a program has at most DEALT query heads.
    """
    if head_dim <= WIDE_HEAD or kv_heads > 1:
        return kv_heads
    return next(n for n in range(1, heads + 1) if heads % n == 0 and heads // n <= DEALT)


def dealt(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """View rows [B, Hkv, T, D] as programs see them under so many query heads: one K/V head as
    several that are the same memory.
    """
    seen = dealt_heads(heads, rows.shape[1], rows.shape[3])
    return rows if seen == rows.shape[1] else rows.expand(-1, seen, -1, -1)


def gathered_config(group: int, head_dim: int, itemsize: int, packed: bool = False) -> Config:
    """Choose the launch shape of prefill over rows in any order: tiles of 128 (query, head) rows
    and 64 bank rows in 16 bits at head_dim 128.

    That is 64 accumulator registers under 8 warps, and K and V twice in flight in 64 KB, so that it
    also runs on sm_89 with its 99 KB. Wider rows make smaller tiles.
    """
    dim = max(16, power_of_two(head_dim))
    # packed rows become floats in registers: at 128 by 64 sm_80 spills
    most = 64 if packed and dim > 64 else 128
    rows = max(16, power_of_two(group), min(most, 32768 // (dim * itemsize)))
    block = max(16, min(64, 16384 // (dim * itemsize)) // (2 if packed else 1))
    return Config(
        block, rows, dim, warps=8 if rows * dim >= 8192 else 4, stages=2, queries=rows // group
    )


def sparse_split(budget: int, kv_heads: int, processors: int = PROCESSORS) -> int:
    """Rows of one program of the sparse kernel: the longest of 256, 128, 64, 32 that still makes
    PER_PROCESSOR programs for each SM of a card from one sequence.
    """
    for split in (256, 128, 64):
        if kv_heads * -(-(budget + TAIL_ROOM) // split) >= PER_PROCESSOR * processors:
            return split
    return 32


def dense_splits(capacity: int) -> int:
    """Count the splits of a dense bank."""
    return max(1, -(-capacity // DENSE_SPLIT))


def sparse_splits(budget: int, kv_heads: int, processors: int = PROCESSORS) -> int:
    """Count the splits of `budget` chosen tokens and TAIL_ROOM tail rows."""
    return -(-(budget + TAIL_ROOM) // sparse_split(budget, kv_heads, processors))


def most_sparse_splits(budget: int, kv_heads: int, processors: int = PROCESSORS) -> int:
    """Bound `sparse_splits` for every budget up to this one.

    A shorter split is only taken while the longer one makes too few programs.
    """
    enough = -(-PER_PROCESSOR * processors // kv_heads)
    return max(-(-(budget + TAIL_ROOM) // 256), 2 * enough)


@triton.jit
def query_tile(first, queries, h, sqq, sqh, QT: tl.constexpr, G: tl.constexpr, M: tl.constexpr):
    """Place QT queries from `first` on under the G heads of kv head h, as M packed rows.

    Returns (r, j, head, live, at), [M] each: row numbers, the query and the head of each row,
    whether the row is one at all, and where it lies.
    """
    r = tl.arange(0, M)
    j = first + r // G
    head = h * G + r % G
    live = (r < QT * G) & (j < queries)
    return r, j, head, live, j * sqq + head * sqh


@triton.jit
def store_partial(part, lse, slot, r, d, live, m, total, acc, D: tl.constexpr):
    """Write one split's normalised output [M, D] and log-sum-exp [M] to scratch row `slot` + r."""
    safe = tl.where(total > 0, total, 1.0)
    at = slot + r
    tl.store(
        part + at[:, None] * D + d[None, :],
        acc / safe[:, None],
        mask=live[:, None] & (d < D)[None, :],
    )
    tl.store(lse + at, tl.where(total > 0, m + tl.log(safe), float("-inf")), mask=live)


@triton.jit
def sparse_extent(counts, tail_start, lengths, b, splits, SPLIT: tl.constexpr, BLOCK: tl.constexpr):
    """Measure sequence b: (chosen rows, first tail row, all rows, rows per split). counts: where
    the number of its chosen rows is, or of one head's.

    A tail beyond TAIL_ROOM lengthens the splits.
    """
    kept = tl.load(counts)
    start = tl.load(tail_start + b)
    rows = kept + tl.load(lengths + b) - start
    return kept, start, rows, tl.maximum(SPLIT, tl.cdiv(tl.cdiv(rows, splits), BLOCK) * BLOCK)


def tickets(batch: int, tiles: int, splits: int, chunk: int) -> int:
    """Count the tickets of a launch of (splits, tiles, batch) programs: one per chunk of splits,
    and one for the chunks.
    """
    return batch * tiles * (1 + -(-splits // chunk))
