"""Attention of queries to a run of rows each, with its log-sum-exp: the parts that PoD's gate
merges. Plain torch, in float32.
"""

import torch

from kernels.prefill import merge

QUERIES, ROWS = 256, 2048  # a tile of logits of 8 heads is 16 MB


def attend_span(q, k, v, low, high, scale):
    """Query i sees rows low[i] .. high[i]-1 (none where high <= low): (out [C, H, D] float32, lse
    [C, H] float32).

    q [C, H, D]; k, v [Hkv, T, D] views; low, high int64 [C]. A query that sees nothing gives zeros
    and -inf. Only rows that some query of a tile sees are read, QUERIES x ROWS of them at a time.
    """
    out, lse = (
        torch.zeros(q.shape, device=q.device),
        torch.full(q.shape[:2], float("-inf"), device=q.device),
    )
    bounds = [
        (at, int(low[at : at + QUERIES].min()), int(high[at : at + QUERIES].max()))
        for at in range(0, len(q), QUERIES)
    ]
    for at, first, last in bounds:
        part = slice(at, at + QUERIES)
        for row in range(first, last, ROWS):
            rows = slice(row, min(last, row + ROWS))
            tile = _tile(q[part], k[:, rows], v[:, rows], low[part] - row, high[part] - row, scale)
            out[part], lse[part] = merge([(out[part], lse[part]), tile], torch.float32)
    return out, lse


def _tile(q, k, v, low, high, scale):
    """Attention of one tile: bounds count from the tile's first row."""
    queries, heads, dim = q.shape
    kv_heads, rows, _ = k.shape
    # [Hkv, G, C, D]
    folded = q.float().view(queries, kv_heads, -1, dim).permute(1, 2, 0, 3)
    logits = torch.matmul(folded, k.float().transpose(1, 2).unsqueeze(1)) * scale
    at = torch.arange(rows, device=q.device)
    logits.masked_fill_((at < low.unsqueeze(1)) | (at >= high.unsqueeze(1)), float("-inf"))
    lse = torch.logsumexp(logits, -1)
    weights = torch.exp(logits - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
    out = torch.matmul(weights, v.float().unsqueeze(1))
    return out.permute(2, 0, 1, 3).reshape(queries, heads, dim), lse.permute(2, 0, 1).reshape(
        queries, heads
    )
