"""Gathered prefill attention: blocks of queries attend to chosen K and V of the past, to a local
band and, causally, to themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels.attention.cpu import split_rows, token_rows
from kernels.attention.reference import attend
from kernels.attention.sparse import bank_rows
from kernels.attention.split import gathered_config
from kernels.launch.dispatch import choose
from kernels.launch.on_device import on_device
from kernels.launch.shapes import softmax_step
from kernels.launch.softmax import PLAIN, Softmax, add_sink, capped
from kernels.launch.triton import tl, triton
from kernels.prefill.dense import attend_chunk, attend_rows
from kernels.prefill.merge import merge
from kernels.prefill.native import attend_prompt, attends_prompt
from kernels.rows.forms import is_packed, stored_queries, value_sums
from kernels.rows.int4_tiles import columns
from kernels.rows.tiles import load_keys, load_values, scaled_logits


def prefill_sparse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    blocks: list[tuple[int, int, int, int]],
    start: int,
    scale: float,
    backend: str = "auto",
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """Attend in blocks of queries to each block's rows of `index` and to the rows from `local` up
    to each query's own.

    q [B, C, H, D]: queries at positions start .. start+C-1; k, v [B, Hkv, T, D] views of any
    strides, last dim contiguous, floats or packed; index [B, N, K] int32; blocks: N tuples (first,
    last, local, count). Queries first .. last-1 see the first `count` entries of index[:, n], which
    are distinct and below `local`, and every row from `local` <= first up to their own. The blocks
    tile the queries in order. softmax: a cap on logits, and sinks. Returns out [B, C, H, D] in
    q.dtype. Raises ValueError for an unknown backend.
    """
    chosen = choose(backend, q, lambda: attends_prompt(q, k, v))
    if chosen == "triton":
        return prefill_sparse_triton(q, k, v, index, blocks, start, scale, softmax)
    forms: dict[str, Callable[..., torch.Tensor]] = {
        "reference": prefill_sparse_ref,
        "native": prefill_sparse_native,
        # packed rows are unpacked there, and those floats may be C++'s
        "cpu": partial(prefill_sparse_cpu, backend=backend if is_packed(k) else chosen),
    }
    attend_block, out = forms[chosen], torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for n, (first, last, local, count) in enumerate(blocks):
        part = slice(first - start, last - start)
        out[:, part] = attend_block(
            q[:, part], k, v, index[:, n], count, local, first, scale, softmax
        )
    return out


def prefill_sparse_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    count: int,
    local: int,
    start: int,
    scale: float,
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """Reference of one block: q [B, C, H, D] at positions start .. start+C-1; k, v as
    `prefill_sparse`; index [B, >= count] int32, its first `count` entries distinct and below
    `local` <= start. Returns out [B, C, H, D] in q.dtype.
    """
    batch, chunk, _, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    stop = start + chunk
    for b in range(batch):
        chosen = index[b, :count].long()
        rows_k, rows_v = (
            torch.cat([t[b].index_select(1, chosen), t[b, :, local:stop]], dim=1) for t in (k, v)
        )
        visible = torch.arange(1, chunk + 1, device=q.device) + count + start - local
        out[b], _ = attend(q[b], rows_k, rows_v, visible, scale, softmax=softmax)
    return out


def prefill_sparse_native(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    count: int,
    local: int,
    start: int,
    scale: float,
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """One block by the C++ kernel, which reads chosen rows where they lie; arguments as
    `prefill_sparse_ref`.
    """
    outs = []
    for b in range(q.shape[0]):
        rows_k, rows_v = (t[b, :, : start + q.shape[1]] for t in (k, v))
        given = scale, start, 0, index[b : b + 1], count, local, softmax
        outs.append(softmax.sunk(*attend_prompt(q[b], rows_k, rows_v, *given))[0])
    return torch.stack(outs) if len(outs) > 1 else outs[0][None]


def prefill_sparse_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    count: int,
    local: int,
    start: int,
    scale: float,
    softmax: Softmax = PLAIN,
    backend: str = "cpu",
) -> torch.Tensor:
    """One block on a CPU by torch's operators, arguments as `prefill_sparse_ref`.

    Gathers the chosen rows once per block of queries and merges three parts by log-sum-exp.
    backend: of the parts.
    """
    outs = []
    for b in range(q.shape[0]):
        one, k_b, v_b = q[b : b + 1], k[b : b + 1], v[b : b + 1]
        parts = [attend_chunk(one, k_b, v_b, start, scale, softmax, backend)]
        if local < start:
            band = k_b[:, :, local:start], v_b[:, :, local:start]
            parts.append(attend_rows(one, *band, scale, False, softmax, backend))
        if count:
            chosen = gather(k_b, v_b, index[b, :count])
            parts.append(attend_rows(one, *chosen, scale, False, softmax, backend))
        whole = merge(parts, q.dtype) if len(parts) > 1 else parts[0]
        outs.append(softmax.sunk(*whole)[0])
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def gather(
    k: torch.Tensor, v: torch.Tensor, chosen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy rows `chosen` [n] int32 or int64 of k and v [1, Hkv, T, D]: two [1, Hkv, n, D] views.

    A token-major bank copies whole rows (`token_rows`), any other layout head by head.
    """
    rows = token_rows(k, v, 0)
    if rows is not None:
        return split_rows(rows.index_select(0, chosen), k, v)
    one, other = (
        torch.stack([head.index_select(0, chosen) for head in t[0]])[None] for t in (k, v)
    )
    return one, other


@triton.jit
def gathered_kernel(
    q,
    k,
    v,
    index,
    blocks,
    out,
    sinks,
    scale,
    count,
    sqb,
    sqc,
    sqh,
    skb,
    skh,
    skt,
    svb,
    svh,
    svt,
    sib,
    sin,
    sob,
    soc,
    soh,
    G: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    CAP: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Attend with M // G queries of one block under one kv head.

    Grid (tiles, kv_heads, blocks * B). Row j * G + g of the tile is query j under head g of the
    group. One pass reads K and V in place: the chosen rows, the band, then the chunk up to the
    tile's last query. blocks [count, 5] int32: first and last query, counted in q; local; chosen
    rows; rows between local and the first query.
    """
    h = tl.program_id(1)
    n = tl.program_id(2) % count
    b = (tl.program_id(2) // count).to(tl.int64)
    first = tl.load(blocks + 5 * n)
    last = tl.load(blocks + 5 * n + 1)
    local = tl.load(blocks + 5 * n + 2)
    kept = tl.load(blocks + 5 * n + 3)
    # rows before the block's first query: every query of the block sees them
    before = kept + tl.load(blocks + 5 * n + 4)
    tile = first + tl.program_id(0) * (M // G)
    if tile < last:
        r = tl.arange(0, M)
        d = columns(k, D, DP)
        c = tile + r // G
        head = h * G + r % G
        live = (r < M // G * G) & (c < last)
        at = b * sqb + c.to(tl.int64)[:, None] * sqc + head[:, None] * sqh + d[None, :]
        rows = tl.load(q + at, mask=live[:, None] & (d < D)[None, :], other=0.0)
        limit = tl.where(live, before + c - first + 1, 0)
        stop = before + tl.minimum(tile + M // G, last) - first
        k += b * skb + h.to(tl.int64) * skh
        v += b * svb + h.to(tl.int64) * svh
        index += b * sib + n.to(tl.int64) * sin
        m = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DP], tl.float32)
        t = tl.arange(0, BLOCK)
        row = bank_rows(index, t, stop, kept, local)
        for _ in range(0, stop, BLOCK):
            k_tile = load_keys(k, row, skt, d, t < stop, rows, D)
            values = load_values(v, row, svt, d, t < stop, rows, D, True)
            scores = tl.dot(rows, tl.trans(k_tile), input_precision="ieee") * scale
            scores = capped(scaled_logits(scores, k, row, skt, t < stop, D), CAP)
            scores = tl.where(t[None, :] < limit[:, None], scores, float("-inf"))
            m, total, acc = softmax_step(scores, values, m, total, acc)
            t += BLOCK
            row = bank_rows(index, t, stop, kept, local)
        if SINKS:
            m, total, acc = add_sink(m, total, acc, sinks, head, live)
        safe = tl.where(total > 0, total, 1.0)
        at = b * sob + c.to(tl.int64)[:, None] * soc + head[:, None] * soh + d[None, :]
        tl.store(
            out + at,
            (acc / safe[:, None]).to(out.dtype.element_ty),
            mask=live[:, None] & (d < D)[None, :],
        )


def prefill_sparse_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    blocks: list[tuple[int, int, int, int]],
    start: int,
    scale: float,
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """`prefill_sparse` by the Triton kernel of this file, same arguments: one launch for all blocks
    of a chunk.

    A chunk of 4096 in blocks of 256, 8 kv heads, group 4: 1024 programs. Every tile of 32 queries
    reads its block's rows again, from L2: a block's chosen rows of one head are 256 KB.
    """
    batch, _, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    config = gathered_config(group, head_dim, q.element_size(), is_packed(k))
    q = stored_queries(q, k)
    rows = [
        (first - start, last - start, local, count, first - local)
        for first, last, local, count in blocks
    ]
    table = on_device(rows, torch.int32, q.device)
    tiles = -(-max(last - first for first, last, _, _ in blocks) // (config.rows // group))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    gathered_kernel[(tiles, kv_heads, len(blocks) * batch)](
        q,
        k,
        v,
        index,
        table,
        out,
        q if softmax.sinks is None else softmax.sinks,
        scale,
        len(blocks),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *index.stride()[:2],
        *out.stride()[:3],
        G=group,
        M=config.rows,
        D=head_dim,
        DP=config.dim,
        BLOCK=config.block,
        CAP=softmax.cap,
        SINKS=softmax.sinks is not None,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return value_sums(out, v)
