"""Prefill attention tile by tile with everything that torch's fused attention lacks: a cap on
logits, and windows with their log-sum-exp. Only families that need one of them pay for it.
"""

from __future__ import annotations

import torch

from kernels.attention.cpu import in_float32
from kernels.attention.split import gathered_config
from kernels.launch.dispatch import choose
from kernels.launch.shapes import softmax_step
from kernels.launch.softmax import PLAIN, Softmax, capped
from kernels.launch.triton import tl, triton
from kernels.prefill.native import attend_prompts, attends_prompt
from kernels.rows.forms import floats, is_packed, stored_queries, value_sums
from kernels.rows.int4_tiles import columns
from kernels.rows.tiles import load_keys, load_values, scaled_logits

Part = tuple[torch.Tensor, torch.Tensor]  # out and log-sum-exp
ROWS = 1024  # rows of a tile in plain torch
TILE = 1 << 20  # its logits: 4 MB


def attend_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softmax: Softmax = PLAIN,
    first: int | None = None,
    window: int = 0,
    backend: str = "auto",
) -> Part:
    """Attend with q [B, C, H, D] to n rows of k, v [B, Hkv, n, D], views of any strides, last dim
    contiguous, or packed.

    first: row of the first query, which sees rows up to its own, and the newest `window` of them
    only if that is not 0; None: every query sees every row. softmax: its cap; sinks are left to the
    caller. Returns (out [B, C, H, D] in q.dtype, lse [B, C, H] float32). Raises ValueError for an
    unknown backend.
    """
    chosen = choose(backend, q, lambda: attends_prompt(q, k, v))
    if chosen == "native":
        return attend_prompts(q, k, v, scale, first, window, softmax)
    attend = attend_tiles_triton if chosen == "triton" else attend_tiles_torch
    return attend(q, k, v, scale, softmax, first, window)


def attend_tiles_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softmax: Softmax,
    first: int | None,
    window: int,
) -> Part:
    """`attend_tiles` in plain torch on every other backend, same arguments and result: float32
    throughout.
    """
    batch, chunk, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, chunk, heads, dtype=torch.float32, device=q.device)
    width = max(1, TILE // (heads * min(ROWS, k.shape[2])))
    for b in range(batch):
        for start in range(0, chunk, width):
            part = slice(start, start + width)
            at = None if first is None else first + start
            out[b, part], lse[b, part] = _tile(q[b, part], k[b], v[b], scale, softmax, at, window)
    return out, lse


def _tile(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softmax: Softmax,
    first: int | None,
    window: int,
) -> Part:
    """Attend with a few queries [C, H, D] of one sequence, ROWS rows at a time."""
    count, heads, dim = q.shape
    kv_heads, stop, low = len(k), k.shape[1], 0
    if first is not None:
        stop = first + count
        low = max(0, first - window + 1) if window else 0
    folded = q.float().view(count, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    m = torch.full((*folded.shape[:2], 1), float("-inf"), device=q.device)
    total, acc = torch.zeros_like(m), torch.zeros_like(folded)
    for row in range(low, stop, ROWS):
        rows = slice(row, min(stop, row + ROWS))
        logits = torch.bmm(folded * scale, in_float32(k[:, rows]).transpose(1, 2))
        softmax.capped(logits)
        if first is not None and (window or rows.stop > first + 1):
            at = torch.arange(first, first + count, device=q.device).unsqueeze(1)
            place = torch.arange(rows.start, rows.stop, device=q.device)
            hidden = (place > at) | (place <= at - window) if window else place > at
            logits.view(kv_heads, -1, count, len(place)).masked_fill_(hidden, float("-inf"))
        top = torch.maximum(m, logits.amax(-1, keepdim=True))
        # a query that has seen nothing yet must not make NaN
        base = top.masked_fill(top == float("-inf"), 0.0)
        weights, shrink = logits.sub_(base).exp_(), torch.exp(m - base)
        total = total * shrink + weights.sum(-1, keepdim=True)
        acc = torch.baddbmm(acc * shrink, weights, floats(v[:, rows]))
        m = top
    acc = (acc / total).view(kv_heads, -1, count, dim).permute(2, 0, 1, 3)
    lse = (m + total.log()).view(kv_heads, -1, count).permute(2, 0, 1)
    return acc.reshape(count, heads, dim).to(q.dtype), lse.reshape(count, heads)


@triton.jit
def capped_tiles_kernel(
    q,
    k,
    v,
    out,
    lse,
    scale,
    chunk,
    count,
    first,
    window,
    sqb,
    sqc,
    sqh,
    skb,
    skh,
    skt,
    svb,
    svh,
    svt,
    G: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    CAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Attend with M // G queries under one kv head: grid (tiles, kv_heads, B).

    Row j * G + g of the tile is query j under head g of the group. out [B, C, H, D] and lse
    [B, C, H] are contiguous. The rows that no query of the tile sees are not read.
    """
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    heads = tl.num_programs(1) * G
    tile = tl.program_id(0) * (M // G)
    r = tl.arange(0, M)
    d = columns(k, D, DP)
    c = tile + r // G
    head = h * G + r % G
    live = (r < M // G * G) & (c < chunk)
    at = b * sqb + c.to(tl.int64)[:, None] * sqc + head[:, None] * sqh + d[None, :]
    rows = tl.load(q + at, mask=live[:, None] & (d < D)[None, :], other=0.0)
    low = 0
    stop = count
    if CAUSAL:
        stop = first + tl.minimum(tile + M // G, chunk)
    if WINDOWED:
        low = tl.maximum(first + tile - window + 1, 0)
    k += b * skb + h.to(tl.int64) * skh
    v += b * svb + h.to(tl.int64) * svh
    m = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    for start in range(low, stop, BLOCK):
        t = start + tl.arange(0, BLOCK)
        row = t.to(tl.int64)
        k_tile = load_keys(k, row, skt, d, t < stop, rows, D)
        values = load_values(v, row, svt, d, t < stop, rows, D, True)
        scores = tl.dot(rows, tl.trans(k_tile), input_precision="ieee") * scale
        scores = capped(scaled_logits(scores, k, row, skt, t < stop, D), CAP)
        seen = live[:, None] & (t < stop)[None, :]
        if CAUSAL:
            seen = seen & (t[None, :] <= (first + c)[:, None])
        if WINDOWED:
            seen = seen & (t[None, :] > (first + c - window)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        m, total, acc = softmax_step(scores, values, m, total, acc)
    safe = tl.where(total > 0, total, 1.0)
    place = (b * chunk + c) * heads + head
    tl.store(
        out + place[:, None] * D + d[None, :],
        (acc / safe[:, None]).to(out.dtype.element_ty),
        mask=live[:, None] & (d < D)[None, :],
    )
    tl.store(lse + place, tl.where(total > 0, m + tl.log(safe), float("-inf")), mask=live)


def attend_tiles_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softmax: Softmax,
    first: int | None,
    window: int,
) -> Part:
    """`attend_tiles` by the Triton kernel of this file, same arguments: one launch, in the tiles of
    `prefill_sparse`.
    """
    batch, chunk, heads, head_dim = q.shape
    group = heads // k.shape[1]
    config = gathered_config(group, head_dim, q.element_size(), is_packed(k))
    # 64 bank rows under a cap at head_dim 128: 24 to 32 bytes of spills on sm_80
    block = min(config.block, 32) if softmax.cap else config.block
    q = stored_queries(q, k)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, chunk, heads, dtype=torch.float32, device=q.device)
    capped_tiles_kernel[(-(-chunk // (config.rows // group)), k.shape[1], batch)](
        q,
        k,
        v,
        out,
        lse,
        scale,
        chunk,
        k.shape[2],
        first or 0,
        window,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        G=group,
        M=config.rows,
        D=head_dim,
        DP=config.dim,
        BLOCK=block,
        CAP=softmax.cap,
        CAUSAL=first is not None,
        WINDOWED=window > 0,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return value_sums(out, v), lse
