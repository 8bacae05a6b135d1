"""Split-K flash-decoding, the parts that the dense and the sparse kernel share: shapes, the softmax
step of a tile, the merge.

Rows are visited in fixed-length splits at absolute boundaries and merged in a fixed order, so that
an output, and the log-sum-exp that a selection hangs on, depends on the rows alone: not on the
capacity, the grid or the number of SMs.
"""

from dataclasses import dataclass

from kernels._triton import tl, triton

# rows of one program: partial results are 1.6 % of the bytes (group 4, bf16), with 256 3.1 %
DENSE_SPLIT = 512
# splits merged by one program: 32 KB at head_dim 128; longer contexts merge in two levels
MERGE_CHUNK = 64
# tail rows that the sparse grid is sized for (default tail: below 320); longer ones still work
TAIL_ROOM = 512
# programs that fill 132 SMs twice: the sparse kernel's split is the longest that reaches it
FILL = 264


@dataclass(frozen=True)
class Config:
    """Launch shape of one kernel: rows of its tile, padded sizes, warps and software-pipeline
    stages.
    """

    block: int  # bank rows of one tile
    # packed (query, head of the group) rows, a power of two >= 16 (the tensor cores' least)
    rows: int
    dim: int  # head_dim padded to a power of two
    warps: int
    stages: int
    queries: int  # queries packed in one tile


def power_of_two(x):
    """The least power of two >= x (x >= 1)."""
    return 1 << (x - 1).bit_length()


def decode_config(queries, group, head_dim, itemsize, tile_bytes):
    """Config of a decode kernel.

    One K tile holds `tile_bytes`: with two tiles of K and V in flight, four times that in shared
    memory; 64 KB of 16 KB tiles leaves three programs on an H100 or H200 and one on sm_89 with its
    99 KB. Queries are packed up to 64 rows and 16 KB (the accumulator then stays at 64 registers a
    thread); past that, a second program reads the same rows, from L2. In float32 the products run
    in registers, not in tensor cores: 32 rows.
    """
    dim = max(16, power_of_two(head_dim))
    most = min(64 if itemsize < 4 else 32, 16384 // (dim * itemsize))
    packed = max(1, min(queries, most // group))
    block = min(64 if packed * group > 32 else 128, max(16, tile_bytes // (dim * itemsize)))
    return Config(
        block, max(16, power_of_two(packed * group)), dim, warps=4, stages=3, queries=packed
    )


def sparse_split(budget, kv_heads):
    """Rows of one program of the sparse kernel: the longest of 256..32 that still makes FILL
    programs for one sequence.
    """
    for split in (256, 128, 64):
        if kv_heads * -(-(budget + TAIL_ROOM) // split) >= FILL:
            return split
    return 32


def dense_splits(capacity):
    return max(1, -(-capacity // DENSE_SPLIT))


def sparse_splits(budget, kv_heads):
    return -(-(budget + TAIL_ROOM) // sparse_split(budget, kv_heads))


def most_sparse_splits(budget, kv_heads):
    """The most splits that any budget up to this one makes: a shorter split is only taken while a
    longer one misses FILL.
    """
    return max(-(-(budget + TAIL_ROOM) // 256), 2 * -(-FILL // kv_heads))


def needs_wide(*strides):
    """Whether offsets inside a split of DENSE_SPLIT rows of these strides pass 31 bits (they never
    do in our own banks).
    """
    return max(strides) * DENSE_SPLIT >= 2**31


@triton.jit
def query_tile(
    q,
    first,
    queries,
    h,
    sqq,
    sqh,
    QT: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """QT queries from `first` on under the G heads of kv head h, as M packed rows: (row numbers r,
    dims d, query of each row, its head, whether it is one, rows [M, DP]).
    """
    r = tl.arange(0, M)
    d = tl.arange(0, DP)
    j = first + r // G
    head = h * G + r % G
    live = (r < QT * G) & (j < queries)
    at = j[:, None] * sqq + head[:, None] * sqh + d[None, :]
    return r, d, j, head, live, tl.load(q + at, mask=live[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def softmax_step(scores, values, m, total, acc):
    """One tile of online softmax: scores [M, N] (-inf where masked), values [N, D]; m, total [M],
    acc [M, D] are carried.
    """
    top = tl.maximum(m, tl.max(scores, 1))
    # a row that has seen nothing yet must not make NaN
    base = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2((scores - base[:, None]) * 1.4426950408889634)
    shrink = tl.exp2((m - base) * 1.4426950408889634)
    acc = acc * shrink[:, None] + tl.dot(p.to(values.dtype), values, input_precision="ieee")
    return top, total * shrink + tl.sum(p, 1), acc


@triton.jit
def store_partial(part, lse, slot, r, d, live, m, total, acc, D: tl.constexpr):
    """Writes one split's normalised output [M, D] and log-sum-exp [M] at row `slot` + r of the
    scratch.
    """
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
    """(chosen rows, first tail row, all rows, rows per split) of sequence b; a tail beyond
    TAIL_ROOM lengthens the splits.
    """
    kept = tl.load(counts + b)
    start = tl.load(tail_start + b)
    rows = kept + tl.load(lengths + b) - start
    return kept, start, rows, tl.maximum(SPLIT, tl.cdiv(tl.cdiv(rows, splits), BLOCK) * BLOCK)


@triton.jit(do_not_specialize=["splits", "chunks", "heads", "unit", "span", "packed", "group"])
def merge_kernel(
    part,
    lse,
    out,
    out_lse,
    lengths,
    counts,
    tail_start,
    splits,
    chunks,
    heads,
    unit,
    span,
    packed,
    group,
    SPARSE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """Merges up to `span` splits of one packed row by log-sum-exp, in ascending order.

    Grid (packed * kv_heads, chunks, B). `unit`: decode splits that one entry of `part` stands for
    (1, or MERGE_CHUNK on the second level). LAST writes out [B, Q, H, D] and out_lse [B, Q, H];
    else the same layout as part, one entry per chunk.
    """
    r = tl.program_id(0) % packed
    h = tl.program_id(0) // packed
    c = tl.program_id(1)
    b = tl.program_id(2)
    if SPARSE:
        kept, start, rows, per = sparse_extent(counts, tail_start, lengths, b, splits, SPLIT, BLOCK)
        used = tl.cdiv(rows, per)
    else:
        used = tl.cdiv(tl.load(lengths + b), SPLIT)
    used = tl.cdiv(used, unit)
    first = c * span
    stop = tl.minimum(first + span, used)
    d = tl.arange(0, DP)
    m = float("-inf")
    total = 0.0
    acc = tl.zeros([DP], tl.float32)
    base = (b * tl.num_programs(0) // packed + h).to(tl.int64) * tl.cdiv(splits, unit) * packed + r
    for i in range(first, stop, 16):
        s = i + tl.arange(0, 16)
        at = base + s * packed
        x = tl.load(lse + at, mask=s < stop, other=float("-inf"))
        y = tl.load(
            part + at[:, None] * D + d[None, :],
            mask=(s < stop)[:, None] & (d < D)[None, :],
            other=0.0,
        )
        top = tl.maximum(m, tl.max(x, 0))
        ground = tl.where(top == float("-inf"), 0.0, top)
        w = tl.exp2((x - ground) * 1.4426950408889634)
        shrink = tl.exp2((m - ground) * 1.4426950408889634)
        acc = acc * shrink + tl.sum(w[:, None] * y, 0)
        total = total * shrink + tl.sum(w, 0)
        m = top
    safe = tl.where(total > 0, total, 1.0)
    result = acc / safe
    if LAST:
        at = (b * (packed // group) + r // group).to(tl.int64) * heads + h * group + r % group
        tl.store(out + at * D + d, result.to(out.dtype.element_ty), mask=d < D)
        tl.store(out_lse + at, tl.where(total > 0, m + tl.log(safe), float("-inf")))
    elif first < used:
        at = ((b * tl.num_programs(0) // packed + h).to(tl.int64) * chunks + c) * packed + r
        tl.store(out + at * D + d, result, mask=d < D)
        tl.store(out_lse + at, tl.where(total > 0, m + tl.log(safe), float("-inf")))


def merge(scratch, out, lengths, kv_heads, splits, split, block, counts=None, tail_start=None):
    """Merges scratch.part [B, Hkv, S, Q*G, D] and .lse [B, Hkv, S, Q*G] into out [B, Q, H, D] and
    scratch.out_lse [B, Q, H].

    One launch up to MERGE_CHUNK splits, two beyond. An entry that a level does not use is never
    read, so the result is the same bit for bit with one level or two.
    """
    batch, queries, heads, head_dim = out.shape
    group = heads // kv_heads
    packed = queries * group
    sparse = counts is not None
    counts, tail_start = (counts, tail_start) if sparse else (lengths, lengths)
    part, lse = scratch.part, scratch.lse
    chunks = -(-splits // MERGE_CHUNK)
    shape = dict(
        SPARSE=sparse, SPLIT=split, BLOCK=block, D=head_dim, DP=power_of_two(head_dim), num_warps=4
    )
    levels = (
        [(1, chunks, MERGE_CHUNK)]
        if chunks == 1
        else [(1, chunks, MERGE_CHUNK), (MERGE_CHUNK, 1, chunks)]
    )
    for unit, programs, span in levels:
        last = programs == 1
        target = (out, scratch.out_lse) if last else (scratch.chunk_part, scratch.chunk_lse)
        merge_kernel[(packed * kv_heads, programs, batch)](
            part,
            lse,
            *target,
            lengths,
            counts,
            tail_start,
            splits,
            programs,
            heads,
            unit,
            span,
            packed,
            group,
            LAST=last,
            **shape,
        )
        part, lse = scratch.chunk_part, scratch.chunk_lse
