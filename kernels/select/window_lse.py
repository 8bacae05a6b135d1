"""The log-sum-exps of a window of queries over all rows, the first pass of
kernels/select/window_scores.py: per split of the rows, then merged in ascending order.
"""

from __future__ import annotations

import torch

from kernels.attention.scratch import Scratch
from kernels.attention.split import dense_splits
from kernels.launch.shapes import DENSE_SPLIT, needs_wide
from kernels.launch.softmax import Softmax, add_sink, capped
from kernels.launch.triton import tl, triton
from kernels.rows.int4_tiles import columns
from kernels.rows.tiles import key_product, load_keys, scaled_logits


@triton.jit
def window_rows(
    q,
    d,
    b,
    h,
    sqb,
    sqw,
    sqh,
    W: tl.constexpr,
    G: tl.constexpr,
    WP: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
):
    """Load the columns d [DP] of the queries of kv head h as [WP * GP, DP], row j * GP + g; the
    padding is zero.
    """
    r = tl.arange(0, WP * GP)
    j = r // GP
    g = r % GP
    at = b.to(tl.int64) * sqb + j[:, None] * sqw + (h * G + g)[:, None] * sqh + d[None, :]
    return tl.load(q + at, mask=((j < W) & (g < G))[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def window_lse_kernel(
    q,
    k,
    narrow,
    lengths,
    lse,
    scale,
    ahead,
    sqb,
    sqw,
    sqh,
    skb,
    skh,
    skt,
    W: tl.constexpr,
    G: tl.constexpr,
    WP: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    CAP: tl.constexpr,
):
    """Compute the log-sum-exp of one split of the rows for every (query, head of the group).

    Grid (splits, kv_heads, B). ahead: tokens between the first query of this launch and the newest
    one. narrow: any tensor of the dtype in which packed rows are multiplied.
    """
    s = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    n = tl.load(lengths + b)
    first = s * SPLIT
    if first < n:
        d = columns(k, D, DP)
        rows = window_rows(q, d, b, h, sqb, sqw, sqh, W, G, WP, GP, D)
        r = tl.arange(0, WP * GP)
        limit = n - (ahead - r // GP) - first
        stop = tl.minimum(n - first, SPLIT)
        k += b.to(tl.int64) * skb + h.to(tl.int64) * skh + first.to(tl.int64) * skt
        like = tl.zeros([1], narrow.dtype.element_ty)
        m = tl.full([WP * GP], float("-inf"), tl.float32)
        total = tl.zeros([WP * GP], tl.float32)
        for start in range(0, stop, BLOCK):
            t = start + tl.arange(0, BLOCK)
            at = t.to(tl.int64) if WIDE else t
            k_tile = load_keys(k, at, skt, d, t < stop, like, D)
            scores = key_product(rows, k_tile) * scale
            scores = capped(scaled_logits(scores, k, at, skt, t < stop, D), CAP)
            scores = tl.where(t[None, :] < tl.minimum(limit, stop)[:, None], scores, float("-inf"))
            top = tl.maximum(m, tl.max(scores, 1))
            base = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp2((scores - base[:, None]) * 1.4426950408889634)
            total = total * tl.exp2((m - base) * 1.4426950408889634) + tl.sum(p, 1)
            m = top
        live = (r // GP < W) & (r % GP < G)
        slot = (
            ((b.to(tl.int64) * tl.num_programs(1) + h) * tl.num_programs(0) + s) * (W * G)
            + r // GP * G
            + r % GP
        )
        tl.store(
            lse + slot,
            tl.where(total > 0, m + tl.log(tl.where(total > 0, total, 1.0)), float("-inf")),
            mask=live,
        )


@triton.jit
def window_merge_kernel(
    lse,
    out,
    lengths,
    sinks,
    splits,
    packed,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    SINKS: tl.constexpr,
    G: tl.constexpr,
):
    """Merge the splits' log-sum-exps, 16 at a time in ascending order: grid (tiles of W*G rows,
    kv_heads, B).
    """
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    used = tl.cdiv(tl.load(lengths + tl.program_id(2)), SPLIT)
    lse += row.to(tl.int64) * splits * packed
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for start in range(0, used, 16):
        s = start + tl.arange(0, 16)
        x = tl.load(
            lse + s[:, None] * packed + r[None, :],
            mask=(s < used)[:, None] & (r < packed)[None, :],
            other=float("-inf"),
        )
        top = tl.maximum(m, tl.max(x, 0))
        base = tl.where(top == float("-inf"), 0.0, top)
        total = total * tl.exp2((m - base) * 1.4426950408889634)
        total += tl.sum(tl.exp2((x - base[None, :]) * 1.4426950408889634), 0)
        m = top
    if SINKS:
        head = tl.program_id(1) * G + r % G
        m, total, _ = add_sink(m, total, tl.zeros([ROWS, 1], tl.float32), sinks, head, r < packed)
    safe = tl.where(total > 0, total, 1.0)
    tl.store(
        out + row * packed + r,
        tl.where(total > 0, m + tl.log(safe), float("-inf")),
        mask=r < packed,
    )


def launch_window_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    narrow: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    ahead: int,
    scratch: Scratch,
    shape: dict[str, int],
    softmax: Softmax,
) -> None:
    """Launch the first pass for window queries q [B, W, H, D], the newest of which lies `ahead`
    positions before the last row: scratch.out_lse takes their log-sum-exps.
    """
    kv_heads, splits = k.shape[1], dense_splits(k.shape[2])
    packed = q.shape[1] * (q.shape[2] // kv_heads)
    window_lse_kernel[(splits, kv_heads, len(q))](
        q,
        k,
        narrow,
        lengths,
        scratch.lse,
        scale,
        ahead,
        *q.stride()[:3],
        *k.stride()[:3],
        SPLIT=DENSE_SPLIT,
        WIDE=needs_wide(k.stride(2)),
        CAP=softmax.cap,
        **shape,
    )
    window_merge_kernel[(-(-packed // 16), kv_heads, len(q))](
        scratch.lse,
        scratch.out_lse,
        lengths,
        scratch.lse if softmax.sinks is None else softmax.sinks,
        splits,
        packed,
        SPLIT=DENSE_SPLIT,
        ROWS=16,
        SINKS=softmax.sinks is not None,
        G=shape["G"],
        num_warps=1,
    )
