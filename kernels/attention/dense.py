"""Dense flash-decoding: a few new queries attend to every K and V of the bank, and may leave the
selector's scores behind.

FULL, WAIT and FILTER layers run `decode_dense` in a decode step. A FILTER layer passes `scores`:
the same pass over K leaves the max over heads of the softmaxed (or raw) logits of the last query,
OmniKV Eq. 3 with selector "last".
"""

from __future__ import annotations

import torch

from kernels.attention.cpu import attend_scored, attend_sequence
from kernels.attention.merge import merge, merge_when_last, merging
from kernels.attention.native import (
    attend,
    attend_everything,
    attend_scored_natively,
    attends,
)
from kernels.attention.reference import attend_alone, head_max
from kernels.attention.scratch import Scratch, ScratchShape, make_scratch
from kernels.attention.split import (
    MERGE_CHUNK,
    dealt,
    decode_config,
    dense_splits,
    query_tile,
    store_partial,
)
from kernels.launch.dispatch import choose
from kernels.launch.pdl import dependent, wait_for_last_kernel
from kernels.launch.radix import BINS, count_first_digit, ordered
from kernels.launch.shapes import DENSE_SPLIT, MOST_REGISTERS, Config, card, needs_wide
from kernels.launch.softmax import PLAIN, Softmax, capped
from kernels.launch.triton import tl, triton
from kernels.rows.forms import is_packed, step_value_sums, wide_stored_queries
from kernels.rows.int4_tiles import columns
from kernels.rows.tiles import (
    load_step_keys,
    load_values,
    scaled_logits,
    softmax_tile,
    step_logits,
    step_queries,
)


def decode_dense_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    scores: torch.Tensor | None = None,
    kind: str = "softmax",
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """Reference of `decode_dense`, same arguments and result; loops over the batch and the queries,
    in float32.
    """
    batch, queries, _, _ = q.shape
    out = torch.empty_like(q)
    for b in range(batch):
        n = int(lengths[b])
        visible = [n - (queries - 1 - j) for j in range(queries)]
        out[b], logits = attend_alone(
            q[b], k[b, :, :n], v[b, :, :n], visible, scale, scores is not None, softmax
        )
        if scores is not None and logits is not None:
            scores[b, :n] = head_max(logits, kind, softmax)[0]
    return out


def decode_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    scores: torch.Tensor | None = None,
    kind: str = "softmax",
    scratch: Scratch | None = None,
    backend: str = "auto",
    ranked: torch.Tensor | None = None,
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """Attend with Q <= 8 new queries to all rows of the bank.

    q [B, Q, H, D]; k, v [B, Hkv, T, D] views of any strides, last dim contiguous, the new tokens
    already written; lengths [B] int32 on q's device: rows visible to the LAST query (query j sees
    lengths - (Q-1-j)); scale: 1/sqrt(D). scores [B, T] float32 or None: the last query's head
    maxima are written below lengths (`kind` "softmax" over the visible rows, or "raw"), and nothing
    beyond. scratch: None allocates. ranked: int32 [B], at most lengths, or None: a
    `select_topk(..., counted=True)` with this scratch follows and chooses from the scores of that
    many first rows, so the kernel that writes them counts them; only the Triton backend does.
    softmax: a cap on logits, which scores have as well, and sinks, which "softmax" counts.
    Returns out [B, Q, H, D] in q.dtype. Mutates scores and scratch. Raises ValueError for an
    unknown backend or too small a scratch.
    """
    chosen = choose(backend, q, lambda: attends(k, v, q.shape[3]))
    if chosen == "native":
        return decode_dense_native(q, k, v, lengths, scale, scores, kind, scratch, softmax)
    if chosen == "triton":
        return decode_dense_triton(q, k, v, lengths, scale, scores, kind, scratch, ranked, softmax)
    if chosen == "cpu":
        return decode_dense_cpu(q, k, v, lengths, scale, scores, kind, scratch, softmax)
    return decode_dense_ref(q, k, v, lengths, scale, scores, kind, softmax)


def decode_logged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    scratch: Scratch | None = None,
    backend: str = "auto",
    softmax: Softmax = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend with one query to all rows, and leave the logits of every head, for methods that sum
    attention: K is read once.

    q [1, 1, H, D]; k, v [Hkv, T, D], last dim contiguous, floats or packed; scale: 1/sqrt(D).
    softmax: as in `decode_dense`. Returns (out [1, 1, H, D] in q.dtype, the scaled and capped
    logits float32 [Hkv, G, 1, T], or None from a kernel that leaves none). Mutates scratch. Raises
    what `decode_dense` does.
    """
    rows = k[None], v[None]
    if choose(backend, q, lambda: attends(*rows, q.shape[3])) != "native":
        lengths = torch.full((1,), k.shape[1], dtype=torch.int32, device=q.device)
        out = decode_dense(
            q, *rows, lengths, scale, scratch=scratch, backend=backend, softmax=softmax
        )
        return out, None
    logits = torch.empty(q.shape[2] * k.shape[1])
    out, _ = attend(q[0], k, v, scale, logits=logits, narrow=True, softmax=softmax)
    return out[None], logits.view(len(k), -1, 1, k.shape[1])


def decode_dense_native(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    scores: torch.Tensor | None,
    kind: str,
    scratch: Scratch | None = None,
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """`decode_dense` by the C++ kernel, same arguments and result: the last query leaves its
    logits. Mutates scores, scratch.part and scratch.logits. Raises ValueError for a dtype that this
    build lacks, MemoryError where the kernel finds no room for its queries.
    """
    parts, held = (None, None) if scratch is None else (scratch.part, scratch.logits)
    if scores is None:
        return attend_everything(q, k, v, lengths, scale, softmax, parts)
    out = torch.empty_like(q)
    for b, n in enumerate(lengths.tolist()):
        rows = k[b, :, :n], v[b, :, :n]
        if n:
            mine = scores[b, :n]
            out[b] = attend_scored_natively(
                q[b], rows[0], rows[1], scale, mine, kind, held, softmax, parts
            )
        else:
            out[b], _ = attend(q[b], *rows, scale, softmax=softmax, parts=parts, narrow=True)
    return out


def decode_dense_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    scores: torch.Tensor | None,
    kind: str,
    scratch: Scratch | None = None,
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """`decode_dense` on CPU tensors by torch's operators, same arguments and result. Mutates
    scores, scratch.blocks and scratch.logits.

    With scores, plain products attend for one query, since its logits are needed anyway; else the
    fused kernel does.
    """
    out = torch.empty_like(q)
    buffers = (None, None) if scratch is None else (scratch.blocks, scratch.logits)
    for b in range(q.shape[0]):
        n = int(lengths[b])
        rows = k[b, :, :n], v[b, :, :n]
        scored = (
            attend_scored(
                q[b, -1:],
                rows[0],
                rows[1],
                scale,
                scores[b, :n],
                kind,
                buffers[0],
                buffers[1],
                softmax,
            )
            if scores is not None and n
            else None
        )
        if scored is not None and q.shape[1] == 1:
            out[b] = scored
        else:
            out[b], _ = attend_sequence(q[b], *rows, scale, buffers[0], softmax)
    return out


@triton.jit(do_not_specialize=["capacity"])
def dense_kernel(
    q,
    k,
    v,
    lengths,
    part,
    lse,
    chunk_part,
    chunk_lse,
    out,
    out_lse,
    tickets,
    logits,
    sinks,
    scale,
    sqb,
    sqq,
    sqh,
    skb,
    skh,
    skt,
    svb,
    svh,
    svt,
    capacity,
    heads,
    queries,
    QT: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    SCORED: tl.constexpr,
    WIDE: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    MERGES: tl.constexpr,
    CHUNK: tl.constexpr,
    RB: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attend to one split of SPLIT rows under one kv head.

    Grid (splits, kv_heads * tiles of QT queries, B). Programs beyond the length leave at once (the
    first split's never, so that somebody writes the output of an empty sequence). Row j * G + g of
    a tile is its query j under head g of the group. SCORED also stores the last query's logits
    [B, H, capacity]. MERGES: levels in which whoever ends last
    merges the splits; 0 leaves them.
    """
    wait_for_last_kernel(DEPENDENT)
    s = tl.program_id(0)
    h = tl.program_id(1) // tl.cdiv(queries, QT)
    first_query = tl.program_id(1) % tl.cdiv(queries, QT) * QT
    b = tl.program_id(2)
    n = tl.load(lengths + b)
    first = s * SPLIT
    used = tl.maximum(tl.cdiv(n, SPLIT), 1)
    if s < used:
        wide = b.to(tl.int64)
        r, j, head, live, place = query_tile(first_query, queries, h, sqq, sqh, QT, G, M)
        # rows of this split that query j may see
        limit = n - (queries - 1 - j) - first
        stop = tl.minimum(n - first, SPLIT)
        # 64 bits once, 32 inside a split
        k += wide * skb + h.to(tl.int64) * skh + first.to(tl.int64) * skt
        v += wide * svb + h.to(tl.int64) * svh + first.to(tl.int64) * svt
        if SCORED:
            left = logits + (wide * heads + head[:, None]) * capacity + first
            newest = (live & (j == queries - 1))[:, None]
        d = columns(k, D, DP)
        rows = step_queries(q + wide * sqb, place, live, d, k, scale, D)
        like = tl.zeros([1], out.dtype.element_ty)
        m = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DP], tl.float32)
        for start in range(0, stop, BLOCK):
            t = start + tl.arange(0, BLOCK)
            at = t.to(tl.int64) if WIDE else t
            k_tile = load_step_keys(k, at, skt, d, t < stop, like, D)
            scores = step_logits(rows, k_tile, k, scale)
            scores = capped(scaled_logits(scores, k, at, skt, t < stop, D), CAP)
            if SCORED:
                tl.store(left + t[None, :], scores, mask=newest & (t < stop)[None, :])
            scores = tl.where(t[None, :] < tl.minimum(limit, stop)[:, None], scores, float("-inf"))
            values = load_values(v, at, svt, d, t < stop, like, D, False)
            m, total, acc = softmax_tile(
                scores, values, v, at, svt, t < stop, m, total, acc, like, D
            )
        pair = b * (heads // G) + h
        begin = first_query * G
        slot = (pair.to(tl.int64) * tl.num_programs(0) + s) * (queries * G) + begin
        store_partial(part, lse, slot, r, d, live, m, total, acc, D)
        if MERGES > 0:
            merge_when_last(
                part, lse, chunk_part, chunk_lse, out, out_lse, tickets, sinks, heads, s, used,
                pair, begin, tl.minimum(begin + QT * G, queries * G), queries * G, MERGES, CHUNK,
                SINKS, G, RB, D, DP,
            )  # fmt: skip


@triton.jit(do_not_specialize=["capacity"])
def head_max_kernel(
    logits,
    lse,
    lengths,
    scores,
    capacity,
    heads,
    queries,
    stride_scores,
    ranked,
    hists,
    SOFTMAX: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNTED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Set scores[b, t], for t below the length, to the max over heads of exp(logit - lse) or of the
    logit. Grid (tiles, B). COUNTED: add the first digits of scores[b, : ranked[b]] to row b of
    hists [B, BINS].
    """
    wait_for_last_kernel(DEPENDENT)
    b = tl.program_id(1)
    n = tl.load(lengths + b)
    first = tl.program_id(0) * BLOCK
    if first < n:
        t = first + tl.arange(0, BLOCK)
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        for h in range(0, heads, HEADS):
            head = h + tl.arange(0, HEADS)
            inside = (head < heads)[:, None] & (t < n)[None, :]
            at = (b.to(tl.int64) * heads + head) * capacity
            x = tl.load(logits + at[:, None] + t[None, :], mask=inside, other=float("-inf"))
            if SOFTMAX:
                last = tl.load(
                    lse + (b * queries + queries - 1) * heads + head, mask=head < heads, other=0.0
                )
                x = tl.exp2((x - last[:, None]) * 1.4426950408889634)
            best = tl.maximum(best, tl.max(x, 0))
        tl.store(scores + b.to(tl.int64) * stride_scores + t, best, mask=t < n)
        if COUNTED:
            stop = tl.load(ranked + b)
            if first < stop:
                count_first_digit(hists + b * 8448, ordered(best), t < stop)


SCORE_TILE = 512  # 256 programs at 128K rows, each reading 2 KB lines per head


def dense_config(
    queries: int, group: int, head_dim: int, itemsize: int, rows: torch.dtype | None = None
) -> Config:
    """Choose 16 KB tiles, 64 rows of 128 bf16 (see `decode_config`); half of it in float32, where
    products take registers, and of 8-bit rows: whole tiles of int8 spill on sm_100, those of fp8
    with scores on sm_90. itemsize: bytes of an element of q; rows: the dtype of K and V where they
    are packed."""
    tile = 16384 if itemsize < 4 and rows not in (torch.int8, torch.float8_e4m3fn) else 8192
    return decode_config(queries, group, head_dim, itemsize, tile, rows)


def registers_told(dtype: torch.dtype, k: torch.Tensor, group: int) -> int:
    """Choose what ptxas is told that a thread of `dense_kernel` may take; 0: nothing.
    dtype: of the queries, as they were given; k [B, Hkv, T, D], or its packed rows.

    On capability 10 and 11 triton 3.7.1's takes all MOST_REGISTERS and still spills 8 bytes of
    plain rows in groups of 1 and 4, of rows of 4 bits and of float16 over rows of 8. Left alone it
    takes 107 to 142 of the first two and spills none; of the others it spills 8 to 24. On 12 the
    last alone spills.
    """
    found = card(k.device)
    if found is None or found.capability[0] < 10:
        return MOST_REGISTERS
    if is_packed(k) and k.dtype != torch.uint8:
        return MOST_REGISTERS + 8 if dtype == torch.float16 else MOST_REGISTERS
    if found.capability[0] >= 12:
        return MOST_REGISTERS
    return 0 if group < 8 or is_packed(k) else MOST_REGISTERS


def decode_dense_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    scores: torch.Tensor | None,
    kind: str,
    scratch: Scratch | None = None,
    ranked: torch.Tensor | None = None,
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """`decode_dense` by the Triton kernels of this file, same arguments, result and errors.

    Launches: decode, which also merges (with a scratch without tickets a launch per level more),
    and with scores the head maxima. Bytes beyond K and V, written and read: 4 * (D + 1) * Q * G per
    split and kv head, and with scores 4 * H per row.
    """
    batch, queries, heads, head_dim = q.shape
    k, v = dealt(k, heads), dealt(v, heads)
    kv_heads, capacity, group = k.shape[1], k.shape[2], heads // k.shape[1]
    if scratch is None:
        sizes = batch, queries, heads, kv_heads, head_dim, capacity
        largest = ScratchShape(*sizes, scored=scores is not None)
        scratch = make_scratch(largest, q.device, "triton")
    splits = dense_splits(capacity)
    config = dense_config(queries, group, head_dim, q.itemsize, k.dtype if is_packed(k) else None)
    slots = batch * heads * queries * splits
    scratch.require(
        part=slots * head_dim,
        lse=slots,
        out_lse=batch * queries * heads,
        logits=batch * heads * capacity if scores is not None else 0,
    )
    out, q = q.new_empty(q.shape), wide_stored_queries(q, k)
    tiles = kv_heads * -(-queries // config.queries)
    dense_kernel[(splits, tiles, batch)](
        q,
        k,
        v,
        lengths,
        *scratch.partial(out),
        scratch.logits,
        softmax.pointer(scratch.lse),
        scale,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        capacity,
        heads,
        queries,
        SPLIT=DENSE_SPLIT,
        BLOCK=config.block,
        SCORED=scores is not None,
        WIDE=needs_wide(k.stride(2), v.stride(2)),
        **softmax.launch(),
        **merging(scratch, batch, tiles, splits, MERGE_CHUNK, head_dim),
        **config.launch(group, head_dim, registers_told(out.dtype, k, group)),
        **dependent(q),
    )
    shape = kv_heads, splits, DENSE_SPLIT, config.block, MERGE_CHUNK
    merge(scratch, out, lengths, *shape, sinks=softmax.sinks)
    if scores is not None:
        launch_head_max(scratch, lengths, scores, capacity, heads, queries, kind, ranked)
    return step_value_sums(out, v)


def launch_head_max(
    scratch: Scratch,
    lengths: torch.Tensor,
    scores: torch.Tensor,
    capacity: int,
    heads: int,
    queries: int,
    kind: str,
    ranked: torch.Tensor | None = None,
) -> None:
    """Launch the last pass: scores [B, T] float32 take the maxima over heads of what `dense_kernel`
    left in scratch.logits [B, heads, capacity], and scratch.hist the first digits of the `ranked`
    first of them.

    lengths, ranked [B] int32 on the device, ranked None for no digits; kind "softmax" reads
    scratch.out_lse [B, queries, heads], "raw" does not. Raises ValueError for too small a
    scratch.hist.
    """
    if ranked is not None:
        scratch.require(hist=len(scores) * BINS)
    head_max_kernel[(-(-capacity // SCORE_TILE), len(scores))](
        scratch.logits,
        scratch.out_lse,
        lengths,
        scores,
        capacity,
        heads,
        queries,
        scores.stride(0),
        lengths if ranked is None else ranked,
        scratch.hist,
        SOFTMAX=kind == "softmax",
        HEADS=4,
        BLOCK=SCORE_TILE,
        COUNTED=ranked is not None,
        num_warps=4,
        **dependent(scores),
    )
