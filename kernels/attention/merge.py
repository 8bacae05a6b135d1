"""Merge of flash-decoding's splits, by log-sum-exp and in ascending order: inside the attention
kernel by whichever program ends last, or in launches of their own.

MERGE_CHUNK splits of a dense layer, SPARSE_CHUNK of a sparse one, make a chunk. If there are more
chunks than one, their results are merged the same way. The program that ends last in a chunk merges
it, and the last of those merges the chunks (counts of arrivals in scratch.tickets). Which program
that is changes nothing: it does the same sums in the same order. Nobody waits for others, so no
order of execution can hang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.attention.scratch import Scratch
from kernels.attention.split import MERGE_TILE, sparse_extent, tickets
from kernels.launch.pdl import dependent, wait_for_last_kernel
from kernels.launch.shapes import MOST_REGISTERS, power_of_two
from kernels.launch.softmax import add_sink
from kernels.launch.triton import tl, triton

if TYPE_CHECKING:
    import torch


def merge_rows(head_dim: int) -> int:
    """Packed rows that are merged side by side."""
    return max(1, MERGE_TILE // (16 * max(16, power_of_two(head_dim))))


def merging(
    scratch: Scratch, batch: int, tiles: int, splits: int, chunk: int, head_dim: int
) -> dict[str, int]:
    """What an attention launch of (splits, tiles, batch) programs takes to merge its own splits.
    Raises ValueError where the scratch has too few tickets.
    """
    if scratch.merges_last:
        scratch.require(tickets=tickets(batch, tiles, splits, chunk))
    levels = (1 if splits <= chunk else 2) if scratch.merges_last else 0
    return dict(MERGES=levels, CHUNK=chunk, RB=merge_rows(head_dim))


@triton.jit
def merge_span(
    part, lse, at, step, first, stop, live, RB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):
    """Merge entries first .. stop-1 of RB rows, 16 at a time: entry i of row r is at `at[r]` + i *
    step. Returns (m [RB], total [RB], acc [RB, DP]).

    Loads pass the L1 cache by: another program on another SM wrote the entries.
    """
    d = tl.arange(0, DP)
    m = tl.full([RB], float("-inf"), tl.float32)
    total = tl.zeros([RB], tl.float32)
    acc = tl.zeros([RB, DP], tl.float32)
    for i in range(first, stop, 16):
        s = i + tl.arange(0, 16)
        where = at[None, :] + s[:, None].to(tl.int64) * step
        inside = (s < stop)[:, None] & live[None, :]
        x = tl.load(lse + where, mask=inside, other=float("-inf"), cache_modifier=".cg")
        y = tl.load(
            part + where[:, :, None] * D + d[None, None, :],
            mask=inside[:, :, None] & (d < D)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        top = tl.maximum(m, tl.max(x, 0))
        ground = tl.where(top == float("-inf"), 0.0, top)
        w = tl.exp2((x - ground[None, :]) * 1.4426950408889634)
        shrink = tl.exp2((m - ground) * 1.4426950408889634)
        acc = acc * shrink[:, None] + tl.sum(w[:, :, None] * y, 0)
        total = total * shrink + tl.sum(w, 0)
        m = top
    return m, total, acc


@triton.jit
def store_merged(out, out_lse, at, m, total, acc, live, D: tl.constexpr, DP: tl.constexpr):
    """Write merged rows [RB, DP] and their log-sum-exps to rows `at` of out and out_lse."""
    d = tl.arange(0, DP)
    safe = tl.where(total > 0, total, 1.0)
    tl.store(
        out + at[:, None] * D + d[None, :],
        (acc / safe[:, None]).to(out.dtype.element_ty),
        mask=live[:, None] & (d < D)[None, :],
    )
    tl.store(out_lse + at, tl.where(total > 0, m + tl.log(safe), float("-inf")), mask=live)


@triton.jit
def merge_level(
    part,
    lse,
    out,
    out_lse,
    sinks,
    pair,
    heads,
    c,
    splits,
    first,
    stop,
    chunks,
    begin,
    end,
    packed,
    LAST: tl.constexpr,
    SINKS: tl.constexpr,
    G: tl.constexpr,
    RB: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """Merge entries first .. stop-1 of `splits` for packed rows begin .. end-1 of the (sequence, kv
    head) pair, into row c of `chunks`, or with LAST into out [B, Q, H, D] and out_lse [B, Q, H].
    SINKS: those of sinks [H] join what LAST writes.
    """
    kv_heads = heads // G
    wide = pair.to(tl.int64)
    for row in range(begin, end, RB):
        r = row + tl.arange(0, RB)
        live = r < end
        m, total, acc = merge_span(
            part, lse, wide * splits * packed + r, packed, first, stop, live, RB, D, DP
        )
        if LAST:
            query = (wide // kv_heads) * (packed // G) + r // G
            head = (pair % kv_heads) * G + r % G
            at = query * heads + head
            if SINKS:
                m, total, acc = add_sink(m, total, acc, sinks, head, live)
        else:
            at = (wide * chunks + c) * packed + r
        store_merged(out, out_lse, at, m, total, acc, live, D, DP)


@triton.jit
def merge_when_last(
    part,
    lse,
    chunk_part,
    chunk_lse,
    out,
    out_lse,
    tickets,
    sinks,
    heads,
    s,
    used,
    pair,
    begin,
    end,
    packed,
    MERGES: tl.constexpr,
    CHUNK: tl.constexpr,
    SINKS: tl.constexpr,
    G: tl.constexpr,
    RB: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """Merge the splits that split s of `used` completes, in MERGES levels. The program that has
    stored it calls this.

    The barrier puts the stores of all threads before the arrival, and the arrival's acquire and
    release put them before the loads of whoever arrives last. That program sets the ticket back to
    zero for the next launch.
    """
    splits = tl.num_programs(0)
    chunks = tl.cdiv(splits, CHUNK)
    tickets += (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * (chunks + 1)
    c = s // CHUNK
    first = c * CHUNK
    stop = tl.minimum(first + CHUNK, used)
    tl.debug_barrier()
    if tl.atomic_add(tickets + 1 + c, 1, sem="acq_rel") == stop - first - 1:
        tl.store(tickets + 1 + c, 0)
        if MERGES == 1:
            merge_level(
                part, lse, out, out_lse, sinks, pair, heads, c, splits, first, stop, chunks, begin,
                end, packed, True, SINKS, G, RB, D, DP,
            )  # fmt: skip
        else:
            merge_level(
                part, lse, chunk_part, chunk_lse, sinks, pair, heads, c, splits, first, stop,
                chunks, begin, end, packed, False, SINKS, G, RB, D, DP,
            )  # fmt: skip
            whole = tl.cdiv(used, CHUNK)
            tl.debug_barrier()
            if tl.atomic_add(tickets, 1, sem="acq_rel") == whole - 1:
                tl.store(tickets, 0)
                merge_level(
                    chunk_part, chunk_lse, out, out_lse, sinks, pair, heads, 0, chunks, 0, whole, 1,
                    begin, end, packed, True, SINKS, G, RB, D, DP,
                )  # fmt: skip


@triton.jit(do_not_specialize=["splits", "entries", "chunks", "heads", "unit", "span", "packed"])
def merge_kernel(
    part,
    lse,
    out,
    out_lse,
    sinks,
    lengths,
    counts,
    tail_start,
    splits,
    entries,
    chunks,
    heads,
    unit,
    span,
    packed,
    SPARSE: tl.constexpr,
    EACH: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST: tl.constexpr,
    SINKS: tl.constexpr,
    G: tl.constexpr,
    RB: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Merge up to `span` entries of RB packed rows: one level of the merge as a launch of its own.

    Grid (row groups * kv_heads, chunks, B). unit: decode splits that one entry stands for (1, or
    a chunk on the second level); entries: of one pair in `part`.
    """
    wait_for_last_kernel(DEPENDENT)
    kv_heads = heads // G
    groups = tl.num_programs(0) // kv_heads
    pair = tl.program_id(2) * kv_heads + tl.program_id(0) // groups
    begin = tl.program_id(0) % groups * RB
    c = tl.program_id(1)
    b = tl.program_id(2)
    if SPARSE:
        own = pair if EACH else b
        _, _, rows, per = sparse_extent(counts + own, tail_start, lengths, b, splits, SPLIT, BLOCK)
        used = tl.cdiv(rows, per)
    else:
        used = tl.cdiv(tl.load(lengths + b), SPLIT)
    used = tl.cdiv(tl.maximum(used, 1), unit)
    first = c * span
    if first < used:
        merge_level(
            part, lse, out, out_lse, sinks, pair, heads, c, entries, first,
            tl.minimum(first + span, used), chunks, begin, tl.minimum(begin + RB, packed), packed,
            LAST, SINKS, G, RB, D, DP,
        )  # fmt: skip


def merge(
    scratch: Scratch,
    out: torch.Tensor,
    lengths: torch.Tensor,
    kv_heads: int,
    splits: int,
    split: int,
    block: int,
    chunk: int,
    counts: torch.Tensor | None = None,
    tail_start: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> None:
    """Merge scratch.part [B, Hkv, S, Q*G, D] and .lse [B, Hkv, S, Q*G] over the S splits, where the
    attention kernel did not (a scratch without tickets); else nothing.

    Overwrites out [B, Q, H, D] and scratch.out_lse [B, Q, H]. split, block: rows of one split and
    of one tile; chunk: splits that one program merges; counts and tail_start: those of a sparse
    launch, None for a dense one; sinks: float32 [H] or None. One launch up to `chunk` splits, two
    beyond. An entry that a level does not use is never read, so one level and two give the same
    bits.
    """
    if scratch.merges_last:
        return
    batch, queries, heads, head_dim = out.shape
    group, packed = heads // kv_heads, queries * (heads // kv_heads)
    side = merge_rows(head_dim)
    chunks = -(-splits // chunk)
    levels = [(1, splits, chunks, chunk)]
    if chunks > 1:
        levels.append((chunk, chunks, 1, chunks))
    part, lse = scratch.part, scratch.lse
    for unit, entries, programs, span in levels:
        last = programs == 1
        target = (out, scratch.out_lse) if last else (scratch.chunk_part, scratch.chunk_lse)
        merge_kernel[(-(-packed // side) * kv_heads, programs, batch)](
            part,
            lse,
            *target,
            scratch.lse if sinks is None else sinks,
            lengths,
            lengths if counts is None else counts,
            lengths if tail_start is None else tail_start,
            splits,
            entries,
            programs,
            heads,
            unit,
            span,
            packed,
            SPARSE=counts is not None,
            EACH=counts is not None and counts.dim() == 2,
            SPLIT=split,
            BLOCK=block,
            LAST=last,
            SINKS=sinks is not None,
            G=group,
            RB=side,
            D=head_dim,
            DP=max(16, power_of_two(head_dim)),
            num_warps=4,
            maxnreg=MOST_REGISTERS,  # left alone ptxas aims at 72 on sm_80, and spills
            **dependent(out),
        )
        part, lse = scratch.chunk_part, scratch.chunk_lse
