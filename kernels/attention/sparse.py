"""Gather-sparse flash-decoding: queries attend to the chosen K and V of the bank and to the tail in
one pass, which reads them by index, in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.attention.cpu import attend_sequence, split_rows, token_rows
from kernels.attention.merge import merge, merge_when_last, merging
from kernels.attention.native import attend_chosen, attends
from kernels.attention.reference import attend_alone
from kernels.attention.scratch import Scratch, ScratchShape, make_scratch
from kernels.attention.split import (
    SPARSE_CHUNK,
    dealt,
    decode_config,
    query_tile,
    sparse_extent,
    sparse_split,
    sparse_splits,
    store_partial,
)
from kernels.launch.dispatch import choose
from kernels.launch.pdl import dependent, wait_for_last_kernel
from kernels.launch.shapes import Config, processors
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


def decode_sparse_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    tail_start: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    softmax: Softmax = PLAIN,
    logs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of `decode_sparse`, same arguments; gathers the chosen rows in ascending order,
    then the tail, then attends.
    """
    if counts.dim() == 2:
        return _by_head(
            decode_sparse_ref, q, k, v, index, counts, tail_start, lengths, scale, softmax
        )
    batch, queries, heads, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out = torch.empty_like(q)
    for b in range(batch):
        n, start, kept = int(lengths[b]), int(tail_start[b]), int(counts[b])
        visible = [kept + n - start - (queries - 1 - j) for j in range(queries)]
        own = _with_tail(logs, b, kept, n - start)
        if index.shape[1] == 1:
            chosen = index[b, 0, :kept].long()
            rows_k, rows_v = (
                torch.cat([t[b].index_select(1, chosen), t[b, :, start:n]], dim=1) for t in (k, v)
            )
            given = visible, scale, False, softmax, own
            out[b], _ = attend_alone(q[b], rows_k, rows_v, *given)
            continue
        for h in range(kv_heads):
            chosen = index[b, h, :kept].long()
            rows_k, rows_v = (
                torch.cat([t[b, h].index_select(0, chosen), t[b, h, start:n]])[None] for t in (k, v)
            )
            heads_of = slice(h * group, (h + 1) * group)
            out[b, :, heads_of], _ = attend_alone(
                q[b, :, heads_of],
                rows_k,
                rows_v,
                visible,
                scale,
                softmax=softmax.of_heads(heads_of),
                logs=own,
            )
    return out


def _with_tail(logs: torch.Tensor | None, b: int, kept: int, tail: int) -> torch.Tensor | None:
    """A sequence's logs of chosen rows, and 0 of each of the tail's."""
    return None if logs is None else torch.cat([logs[b, :kept], logs.new_zeros(tail)])


def decode_sparse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    tail_start: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    scratch: Scratch | None = None,
    backend: str = "auto",
    softmax: Softmax = PLAIN,
    logs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with Q <= 8 new queries to the rows of `index` and the rows tail_start .. lengths-1.

    q [B, Q, H, D]; k, v [B, Hkv, T, D] views of any strides, last dim contiguous; index [B, 1 or
    Hkv, K] int32: the first counts[b] entries are ascending, distinct and below tail_start[b], the
    rest is ignored; counts [B] int32, or [B, Hkv] contiguous beside an index of as many heads, of
    which each has its own number of entries; tail_start, lengths [B] int32: lengths counts the rows
    visible to the LAST query (query j sees Q-1-j fewer of the tail). scratch: None allocates.
    softmax: a cap on logits, and sinks. logs: float32 [B, K], contiguous, added to the logits of
    the index's entries beside counts [B]: the log of how many rows one stands for; None: each
    stands for itself. Visits rows in ascending order. Returns out [B, Q, H, D] in q.dtype. Mutates
    scratch. Raises ValueError for an unknown backend, counts of other heads than the index has,
    logs of another shape, or too small a scratch.
    """
    if counts.dim() == 2 and counts.shape[1] != index.shape[1]:
        raise ValueError(
            f"decode_sparse: found counts of {counts.shape[1]} heads beside an index of "
            f"{index.shape[1]}, expected as many"
        )
    if counts.dim() == 2 and counts.shape[1] == 1:
        counts = counts[:, 0].contiguous()
    if logs is not None and (counts.dim() == 2 or logs.shape != index.shape[::2]):
        raise ValueError(
            f"decode_sparse: found logs {tuple(logs.shape)} beside an index {tuple(index.shape)} "
            f"and counts {tuple(counts.shape)}, expected one for each entry, and one count"
        )
    chosen = choose(backend, q, lambda: attends(k, v, q.shape[3]))
    if chosen == "native":
        parts = None if scratch is None else scratch.part
        given = index, counts, tail_start, lengths, scale, softmax, parts
        return attend_chosen(q, k, v, *given, logs=logs)
    if chosen == "triton":
        return decode_sparse_triton(
            q, k, v, index, counts, tail_start, lengths, scale, scratch, softmax, logs
        )
    if chosen == "cpu":
        return decode_sparse_cpu(
            q, k, v, index, counts, tail_start, lengths, scale, scratch, softmax, logs
        )
    return decode_sparse_ref(q, k, v, index, counts, tail_start, lengths, scale, softmax, logs)


def decode_sparse_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    tail_start: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    scratch: Scratch | None = None,
    softmax: Softmax = PLAIN,
    logs: torch.Tensor | None = None,
) -> torch.Tensor:
    """`decode_sparse` on CPU tensors, same arguments.

    Gathers K and V into scratch, then attends to them as one short sequence. A token-major bank
    gathers whole rows (`token_rows`), any other layout a row per kv head. Nothing is gathered where
    nothing was chosen. Heads of different counts attend one after the other: a product has rows of
    one count.
    """
    if counts.dim() == 2:
        given = index, counts, tail_start, lengths, scale, softmax, scratch
        return _by_head(decode_sparse_cpu, q, k, v, *given)
    out, batch = torch.empty_like(q), len(q)
    kv_heads = k.shape[1]
    width = kv_heads * (k.shape[3] + v.shape[3])
    for b in range(batch):
        kept, start, n = int(counts[b]), int(tail_start[b]), int(lengths[b])
        blocks = None if scratch is None else scratch.blocks
        if not kept:
            # the tail alone is one run of rows, as in a sliding window: read in place
            tail = k[b, :, start:n], v[b, :, start:n]
            out[b], _ = attend_sequence(q[b], *tail, scale, blocks, softmax)
            continue
        total, rows = kept + n - start, token_rows(k, v, b)
        buffer = None if scratch is None else scratch.rows
        if buffer is None or buffer.dtype != k.dtype or buffer.numel() < total * width:
            buffer = torch.empty(total * width, dtype=k.dtype)
        buffer = buffer[: total * width]
        if rows is not None and index.shape[1] == 1:
            packed = buffer.view(total, width)
            torch.index_select(rows, 0, index[b, 0, :kept], out=packed[:kept])
            packed[kept:].copy_(rows[start:n])
            rows_k, rows_v = (t[0] for t in split_rows(packed, k, v))
        else:
            parts = buffer.split([kv_heads * total * t.shape[3] for t in (k, v)])
            rows_k, rows_v = (part.view(kv_heads, total, -1) for part in parts)
            for found, bank in ((rows_k, k[b]), (rows_v, v[b])):
                for h in range(kv_heads):
                    at = index[b, h % index.shape[1], :kept]
                    torch.index_select(bank[h], 0, at, out=found[h, :kept])
                    found[h, kept:].copy_(bank[h, start:n])
        own = _with_tail(logs, b, kept, n - start)
        out[b], _ = attend_sequence(q[b], rows_k, rows_v, scale, blocks, softmax, own)
    return out


def _by_head(
    decode: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    tail_start: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    softmax: Softmax,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """`decode` of each K/V head by itself, with its own counts [B]."""
    out, group = torch.empty_like(q), q.shape[2] // k.shape[1]
    more = {} if scratch is None else {"scratch": scratch}
    for h in range(k.shape[1]):
        own, mine = slice(h, h + 1), slice(h * group, (h + 1) * group)
        rows = q[:, :, mine], k[:, own], v[:, own], index[:, own], counts[:, h]
        given = dict(softmax=softmax.of_heads(mine), **more)
        out[:, :, mine] = decode(*rows, tail_start, lengths, scale, **given)
    return out


@triton.jit
def bank_rows(index, t, stop, kept, start):
    """Map visited positions t to bank rows: index[t] for the chosen ones, then the tail; 0 from
    `stop` on.
    """
    chosen = tl.load(index + t, mask=t < tl.minimum(kept, stop), other=0)
    return tl.where(t < kept, chosen, tl.where(t < stop, t - kept + start, 0)).to(tl.int64)


@triton.jit
def sparse_kernel(
    q,
    k,
    v,
    index,
    counts,
    tail_start,
    lengths,
    logs,
    part,
    lse,
    chunk_part,
    chunk_lse,
    out,
    out_lse,
    tickets,
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
    sib,
    sih,
    slb,
    kv_heads,
    queries,
    EACH: tl.constexpr,
    QT: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    LOGS: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
    MERGES: tl.constexpr,
    CHUNK: tl.constexpr,
    RB: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attend to one split of the visited rows (chosen, then tail) under one kv head.

    Grid as in `dense_kernel`. EACH: whether every head has a count of its own. LOGS: whether `logs`
    are added to what is chosen. The bank rows of a
    tile are known one iteration ahead (loop-carried): only then does the compiler pipeline the K
    and V loads.
    """
    wait_for_last_kernel(DEPENDENT)
    s = tl.program_id(0)
    h = tl.program_id(1) // tl.cdiv(queries, QT)
    first_query = tl.program_id(1) % tl.cdiv(queries, QT) * QT
    b = tl.program_id(2)
    own = b * kv_heads + h if EACH else b
    kept, start, visited, per = sparse_extent(
        counts + own, tail_start, lengths, b, tl.num_programs(0), SPLIT, BLOCK
    )
    first = s * per
    used = tl.maximum(tl.cdiv(visited, per), 1)
    if s < used:
        wide = b.to(tl.int64)
        r, j, _, live, place = query_tile(first_query, queries, h, sqq, sqh, QT, G, M)
        limit = visited - (queries - 1 - j)
        stop = tl.minimum(first + per, visited)
        k += wide * skb + h.to(tl.int64) * skh
        v += wide * svb + h.to(tl.int64) * svh
        index += wide * sib + h.to(tl.int64) * sih
        if LOGS:
            logs += wide * slb
        d = columns(k, D, DP)
        rows = step_queries(q + wide * sqb, place, live, d, k, scale, D)
        like = tl.zeros([1], out.dtype.element_ty)
        m = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DP], tl.float32)
        t = first + tl.arange(0, BLOCK)
        row = bank_rows(index, t, stop, kept, start)
        for _ in range(first, stop, BLOCK):
            k_tile = load_step_keys(k, row, skt, d, t < stop, like, D)
            values = load_values(v, row, svt, d, t < stop, like, D, False)
            scores = step_logits(rows, k_tile, k, scale)
            scores = capped(scaled_logits(scores, k, row, skt, t < stop, D), CAP)
            if LOGS:
                scores += tl.load(logs + t, mask=t < tl.minimum(kept, stop), other=0.0)[None, :]
            scores = tl.where(t[None, :] < tl.minimum(limit, stop)[:, None], scores, float("-inf"))
            m, total, acc = softmax_tile(
                scores, values, v, row, svt, t < stop, m, total, acc, like, D
            )
            t += BLOCK
            row = bank_rows(index, t, stop, kept, start)
        pair = b * kv_heads + h
        begin = first_query * G
        slot = (pair.to(tl.int64) * tl.num_programs(0) + s) * (queries * G) + begin
        store_partial(part, lse, slot, r, d, live, m, total, acc, D)
        if MERGES > 0:
            merge_when_last(
                part, lse, chunk_part, chunk_lse, out, out_lse, tickets, sinks, kv_heads * G, s,
                used, pair, begin, tl.minimum(begin + QT * G, queries * G), queries * G, MERGES,
                CHUNK, SINKS, G, RB, D, DP,
            )  # fmt: skip


def sparse_config(
    queries: int, group: int, head_dim: int, itemsize: int, rows: torch.dtype | None = None
) -> Config:
    """Choose 8 KB tiles, 32 rows of 128 bf16: a split of 64 rows then is two tiles, both in flight
    from the start.
    """
    return decode_config(queries, group, head_dim, itemsize, 8192, rows)


def decode_sparse_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    counts: torch.Tensor,
    tail_start: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    scratch: Scratch | None = None,
    softmax: Softmax = PLAIN,
    logs: torch.Tensor | None = None,
) -> torch.Tensor:
    """`decode_sparse` by the Triton kernels of this file, same arguments.

    Launches: decode, which also merges (see `decode_dense_triton`). 2048 tokens and a tail under 8
    kv heads are 37 splits of 64 rows, 296 programs that work (132 SMs hold three or more of them
    each at once). Every visited row is read once. Partial results add 4 * (D + 1) * Q * G bytes per
    split and kv head, written and read.
    """
    batch, queries, heads, head_dim = q.shape
    k, v = dealt(k, heads), dealt(v, heads)
    kv_heads, budget = k.shape[1], index.shape[2]
    group = heads // kv_heads
    if scratch is None:
        largest = ScratchShape(batch, queries, heads, kv_heads, head_dim, 1, max(1, budget))
        scratch = make_scratch(largest, q.device, "triton")
    sized = budget, kv_heads, processors(q.device)
    split, splits = sparse_split(*sized), sparse_splits(*sized)
    packed = k.dtype if is_packed(k) else None
    config = sparse_config(queries, group, head_dim, q.element_size(), packed)
    block, tiles = min(config.block, split), kv_heads * -(-queries // config.queries)
    slots = batch * heads * queries * splits
    scratch.require(part=slots * head_dim, lse=slots, out_lse=batch * queries * heads)
    out, q = q.new_empty(q.shape), wide_stored_queries(q, k)
    places = index, counts, tail_start, lengths, scratch.lse if logs is None else logs
    each = index.stride(1) if index.shape[1] > 1 else 0
    lists = index.stride(0), each, 0 if logs is None else logs.stride(0)
    sparse_kernel[(splits, tiles, batch)](
        q,
        k,
        v,
        *places,
        *scratch.partial(out),
        softmax.pointer(scratch.lse),
        scale,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *lists,
        kv_heads,
        queries,
        EACH=counts.dim() == 2,
        SPLIT=split,
        BLOCK=block,
        LOGS=logs is not None,
        **softmax.launch(),
        **merging(scratch, batch, tiles, splits, SPARSE_CHUNK, head_dim),
        **config.launch(group, head_dim),
        **dependent(q),
    )
    shape = kv_heads, splits, split, block, SPARSE_CHUNK
    merge(scratch, out, lengths, *shape, counts, tail_start, softmax.sinks)
    return step_value_sums(out, v)
