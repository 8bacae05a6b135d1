"""Score every row by a window of queries, for the `uniform` and `exponential` selectors: the sum
over the window of weighted head maxima (OmniKV Eq. 3 and 4).
"""

from __future__ import annotations

import torch

from kernels.attention.cpu import WINDOW_BLOCK, logit_blocks
from kernels.attention.reference import head_max
from kernels.attention.scratch import Scratch, ScratchShape, make_scratch
from kernels.attention.split import dense_splits
from kernels.launch.dispatch import choose
from kernels.launch.shapes import Config, power_of_two
from kernels.launch.softmax import PLAIN, Softmax, capped
from kernels.launch.triton import tl, triton
from kernels.rows.forms import is_packed, key_floats, wide_stored_queries
from kernels.rows.int4_tiles import columns
from kernels.rows.tiles import key_product, load_keys, scaled_logits
from kernels.select.window.native import score_window, scores_window
from kernels.select.window_lse import launch_window_lse, window_rows


def window_scores_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    alpha: torch.Tensor,
    kind: str,
    scores: torch.Tensor,
    softmax: Softmax = PLAIN,
) -> None:
    """Reference of `window_scores`, same arguments; loops over the batch."""
    batch, window, heads, dim = q.shape
    for b in range(batch):
        n = int(lengths[b])
        rows = key_floats(k[b, :, :n]).contiguous()
        kv_heads = rows.shape[0]
        packed = q[b].float().view(window, kv_heads, heads // kv_heads, dim).permute(1, 0, 2, 3)
        logits = torch.einsum("hwgd,hnd->whgn", packed, rows).reshape(window, heads, n) * scale
        logits = softmax.capped(logits)
        limit = n - (window - 1) + torch.arange(window, device=k.device)
        logits = logits.masked_fill(
            torch.arange(n, device=k.device) >= limit.view(-1, 1, 1), float("-inf")
        )
        # a window longer than the sequence begins before it
        live = limit > 0
        maxima = head_max(logits[live], kind, softmax)
        # a row that a query cannot see adds nothing to the sum
        if kind == "raw":
            maxima = maxima.masked_fill(torch.isinf(maxima), 0.0)
        scores[b, :n] = (alpha[live].view(-1, 1) * maxima).sum(0)


def window_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    alpha: torch.Tensor,
    kind: str,
    scores: torch.Tensor,
    scratch: Scratch | None = None,
    backend: str = "auto",
    softmax: Softmax = PLAIN,
) -> None:
    """Set scores[b, i] to the sum over window queries j of alpha[j] * the max over heads of the
    score of row i: OmniKV Eq. 3 and 4.

    q [B, W, H, D]: the last W queries, each rotated to its position; k [B, Hkv, T, D] view of any
    strides, last dim contiguous; lengths [B] int32: rows visible to the last query (query j sees
    lengths - (W-1-j); queries that see none are skipped); alpha [W] float32, newest last; kind
    "softmax" (over the rows that the query sees) or "raw"; scores [B, T] float32; scratch: None
    allocates; softmax: as in `decode_dense`. Mutates scores below lengths, and scratch. Raises
    ValueError for an unknown backend or too small a scratch.
    """
    chosen = choose(backend, q, lambda: scores_window(q, k))
    if chosen == "native":
        for b, n in enumerate(lengths.tolist()):
            live = min(q.shape[1], n)  # a window longer than the sequence begins before it
            if live:
                late, weights = q[b, -live:], alpha[-live:]
                score_window(late, k[b, :, :n], scale, weights, kind, scores[b, :n], softmax)
    elif chosen == "triton":
        window_scores_triton(q, k, lengths, scale, alpha, kind, scores, scratch, softmax)
    elif chosen == "cpu":
        window_scores_cpu(q, k, lengths, scale, alpha, kind, scores, scratch, softmax, backend)
    else:
        window_scores_ref(q, k, lengths, scale, alpha, kind, scores, softmax)


def window_scores_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    alpha: torch.Tensor,
    kind: str,
    scores: torch.Tensor,
    scratch: Scratch | None = None,
    softmax: Softmax = PLAIN,
    backend: str = "cpu",
) -> None:
    """`window_scores` on CPU tensors, same arguments: one product per block of rows and kv head for
    all queries.

    kind "softmax" visits K twice, for the log-sum-exps and for the scores: heads x W logits per row
    would not fit in any cache.
    """
    for b in range(q.shape[0]):
        n = int(lengths[b])
        # a window longer than the sequence begins before it
        live = min(q.shape[1], n)
        if not live:
            continue
        rows, late, weights = k[b, :, :n], q[b, -live:], alpha[-live:]
        buffer = None if scratch is None else scratch.blocks
        limit = n - (live - 1) + torch.arange(live).view(-1, 1, 1)
        total = None
        given = late, rows, scale, buffer, WINDOW_BLOCK, softmax, backend
        for start, stop, logits in logit_blocks(*given) if kind == "softmax" else ():
            part = torch.logsumexp(_mask_late(logits, start, stop, limit), -1, keepdim=True)
            total = part if total is None else torch.logaddexp(total, part)
        if total is not None and softmax.sinks is not None:
            total = torch.logaddexp(total, softmax.sinks.view(len(k[b]), 1, -1, 1))
        for start, stop, logits in logit_blocks(*given):
            _mask_late(logits, start, stop, limit)
            # [live, stop - start]
            best = (logits if total is None else logits.sub_(total)).amax(2).amax(0)
            best = best.masked_fill_(best == float("-inf"), 0.0) if total is None else best.exp_()
            torch.mv(best.t(), weights, out=scores[b, start:stop])


def _mask_late(logits: torch.Tensor, start: int, stop: int, limit: torch.Tensor) -> torch.Tensor:
    """Set logits [Hkv, W, G, rows start..stop] to -inf from row `limit` [W, 1, 1] on, in place.

    Only the newest blocks need it.
    """
    if stop > int(limit[0]):
        logits.masked_fill_(torch.arange(start, stop) >= limit, float("-inf"))
    return logits


@triton.jit
def window_max_kernel(
    q,
    k,
    narrow,
    lengths,
    lse,
    alpha,
    scores,
    scale,
    ahead,
    kv_heads,
    sqb,
    sqw,
    sqh,
    skb,
    skh,
    skt,
    stride_scores,
    W: tl.constexpr,
    G: tl.constexpr,
    WP: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BLOCK: tl.constexpr,
    SOFTMAX: tl.constexpr,
    ADD: tl.constexpr,
    CAP: tl.constexpr,
):
    """Score one tile of rows: maxima over all heads per query, then the weighted sum over the
    window. Grid (tiles, B).

    ADD continues the sum of an earlier launch over older queries.
    """
    b = tl.program_id(1)
    n = tl.load(lengths + b)
    first = tl.program_id(0) * BLOCK
    if first < n:
        t = first + tl.arange(0, BLOCK)
        r = tl.arange(0, WP * GP)
        d = columns(k, D, DP)
        j = r // GP
        live = (j < W) & (r % GP < G)
        seen = live[:, None] & (t[None, :] < tl.minimum(n - (ahead - j), n)[:, None])
        k += b.to(tl.int64) * skb + first.to(tl.int64) * skt
        like = tl.zeros([1], narrow.dtype.element_ty)
        best = tl.full([WP, BLOCK], float("-inf"), tl.float32)
        for h in range(0, kv_heads):
            rows = window_rows(q, d, b, h, sqb, sqw, sqh, W, G, WP, GP, D)
            at, head = tl.arange(0, BLOCK).to(tl.int64), k + tl.cast(h, tl.int64) * skh
            tile = load_keys(head, at, skt, d, t < n, like, D)
            x = key_product(rows, tile) * scale
            x = capped(scaled_logits(x, head, at, skt, t < n, D), CAP)
            if SOFTMAX:
                whole = tl.load(
                    lse + ((b * kv_heads + h) * W + j) * G + r % GP, mask=live, other=0.0
                )
                x = (x - whole[:, None]) * 1.4426950408889634
            x = tl.where(seen, x, float("-inf"))
            best = tl.maximum(best, tl.max(tl.reshape(x, [WP, GP, BLOCK]), 1))
        w = tl.arange(0, WP)
        weight = tl.load(alpha + w, mask=w < W, other=0.0)
        best = tl.where(best == float("-inf"), 0.0, tl.exp2(best) if SOFTMAX else best)
        score = tl.sum(weight[:, None] * best, 0)
        scores += b.to(tl.int64) * stride_scores
        if ADD:
            score += tl.load(scores + t, mask=t < n, other=0.0)
        tl.store(scores + t, score, mask=t < n)


def window_config(window: int, group: int, head_dim: int, itemsize: int, packed: bool) -> Config:
    """Choose the launch shape of both passes: the queries of one launch under one kv head are one
    tile of W x G rows (16 x 4: 64).

    Up to 64 KB of queries and 256 rows at once, so that the scores of a tile stay at 64 registers a
    thread under 8 warps; half of it in float32, where products take registers too. With packed
    rows, whose queries are two numbers each, sm_89 spills 8 bytes under 4 warps.
    """
    dim, padded = max(16, power_of_two(head_dim)), power_of_two(group)
    room = 65536 if itemsize < 4 else 32768
    queries = max(1, min(window, min(256, room // (dim * itemsize)) // padded))
    rows = max(16, power_of_two(queries) * padded)
    block = max(16, min(64, room // 4 // (dim * itemsize)))
    # the queries of the next kv head are staged too
    stages = 3 if rows * dim * itemsize < 32768 else 2
    warps = 8 if packed or rows > 64 else 4
    return Config(block, rows, dim, warps=warps, stages=stages, queries=queries)


def window_scores_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    alpha: torch.Tensor,
    kind: str,
    scores: torch.Tensor,
    scratch: Scratch | None = None,
    softmax: Softmax = PLAIN,
) -> None:
    """`window_scores` by the Triton kernels of this file, same arguments.

    "softmax" reads K twice (log-sum-exp, then scores) and q once per tile from L2: 4 * Hkv * D
    bytes per row in bf16, as much as one dense layer's K and V. Keeping the window's logits would
    write and read 8 * W * H instead. "raw" reads K once. Log-sum-exps add 4 * W * H bytes per 512
    rows, written and read. A window past 256 rows (W x G) or 64 KB takes several such launches.
    """
    batch, window, heads, head_dim = q.shape
    kv_heads, capacity, group = k.shape[1], k.shape[2], heads // k.shape[1]
    narrow, q = q, wide_stored_queries(q, k)
    if scratch is None:
        largest = ScratchShape(batch, 1, heads, kv_heads, head_dim, capacity, window=window)
        scratch = make_scratch(largest, q.device, "triton")
    config = window_config(window, group, head_dim, q.element_size(), is_packed(k))
    padded, splits = power_of_two(group), dense_splits(capacity)
    shape = dict(
        G=group,
        WP=config.rows // padded,
        GP=padded,
        D=head_dim,
        DP=config.dim,
        BLOCK=config.block,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    scratch.require(
        lse=batch * heads * config.queries * splits, out_lse=batch * heads * config.queries
    )
    strides = (*q.stride()[:3], *k.stride()[:3])
    for first in range(0, window, config.queries):
        part = q[:, first : first + config.queries]
        shape["W"], ahead = part.shape[1], window - 1 - first
        if kind == "softmax":
            launch_window_lse(part, k, narrow, lengths, scale, ahead, scratch, shape, softmax)
        window_max_kernel[(-(-capacity // config.block), batch)](
            part,
            k,
            narrow,
            lengths,
            scratch.out_lse,
            alpha[first:],
            scores,
            scale,
            ahead,
            kv_heads,
            *strides,
            scores.stride(0),
            SOFTMAX=kind == "softmax",
            ADD=first > 0,
            CAP=softmax.cap,
            **shape,
        )
