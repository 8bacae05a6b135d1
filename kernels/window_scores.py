"""Scores of a window of queries for the `uniform` and `exponential` selectors: sum over the window of weighted head maxima."""

import torch

from kernels.dispatch import choose
from kernels.reference import head_max


def window_scores_ref(q, k, lengths, scale, alpha, kind, keys):
    """Reference of `window_scores`, same arguments; loops over the batch."""
    batch, window, heads, dim = q.shape
    for b in range(batch):
        n = int(lengths[b])
        rows = k[b, :, :n].float().contiguous()
        kv_heads = rows.shape[0]
        packed = q[b].float().view(window, kv_heads, heads // kv_heads, dim).permute(1, 0, 2, 3)
        logits = torch.einsum("hwgd,hnd->whgn", packed, rows).reshape(window, heads, n) * scale
        limit = n - (window - 1) + torch.arange(window, device=k.device)
        logits = logits.masked_fill(torch.arange(n, device=k.device) >= limit.view(-1, 1, 1), float("-inf"))
        live = limit > 0                                   # a window longer than the sequence has queries before its start
        maxima = head_max(logits[live], kind)
        if kind == "raw":                                  # a row that a query cannot see adds nothing to the sum
            maxima = maxima.masked_fill(torch.isinf(maxima), 0.0)
        keys[b, :n] = (alpha[live].view(-1, 1) * maxima).sum(0)


def window_scores(q, k, lengths, scale, alpha, kind, keys, scratch=None, path="auto"):
    """keys[b, i] = sum over window queries j of alpha[j] * max over heads of the score of row i (OmniKV Eq. 3 and 4).

    q [B, W, H, D]: the last W queries, each rotated to its own position; k [B, Hkv, T, D] view; lengths [B] int32: rows
    visible to the last query (query j sees lengths - (W-1-j); queries with none are skipped); alpha [W] float32 (newest last);
    kind "softmax" (over the rows that the query sees) or "raw"; keys [B, T] float32, overwritten below lengths.
    """
    chosen = choose(path, q)
    if chosen == "triton":
        window_scores_triton(q, k, lengths, scale, alpha, kind, keys, scratch)
    elif chosen == "cpu":
        window_scores_cpu(q, k, lengths, scale, alpha, kind, keys, scratch)
    else:
        window_scores_ref(q, k, lengths, scale, alpha, kind, keys)


def window_scores_cpu(q, k, lengths, scale, alpha, kind, keys, scratch=None):
    """`window_scores` on CPU tensors, same arguments."""
    window_scores_ref(q, k, lengths, scale, alpha, kind, keys)


def window_scores_triton(q, k, lengths, scale, alpha, kind, keys, scratch=None):
    """`window_scores` by the Triton kernels of this file, same arguments."""
    window_scores_ref(q, k, lengths, scale, alpha, kind, keys)
