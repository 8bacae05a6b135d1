"""How much a chunk of queries reads each row of the past: the scores of OmniKV-prefill, and of every method that sums attention.

S_i = sum over the chunk's queries of max over heads of softmax(q . k_i) (OmniKV section D.10 with Eq. 3-4, uniform weights).
q . k is computed again from the log-sum-exp that the dense pass left; what leaves the kernel is one number per row.
"""

import torch

from kernels.dispatch import choose

ROWS = 1024         # rows per block on a CPU: the block's weights (4 B x C x G x ROWS, 3 MB at C = 256, G = 3) stay near the cache


def column_scores_ref(q, k, lse, stop, scale, sums):
    """Reference of `column_scores`, same arguments; holds every weight."""
    batch, chunk, heads, dim = q.shape
    kv_heads = k.shape[1]
    folded = q.float().view(batch, chunk, kv_heads, heads // kv_heads, dim)
    logits = torch.einsum("bchgd,bhnd->bchgn", folded, k[:, :, :stop].float()) * scale
    weights = torch.exp(logits - lse.view(batch, chunk, kv_heads, -1, 1))
    sums[:, :stop] = weights.flatten(2, 3).amax(2).sum(1)


def column_scores(q, k, lse, stop, scale, sums, path="auto"):
    """sums[b, i] = sum over queries of max over heads of exp(q . k_i * scale - lse), for rows i < stop.

    q [B, C, H, D]: queries that all see rows 0 .. stop-1; k [B, Hkv, T, D] view of any strides, last dim contiguous; lse [B, C, H]
    float32: log-sum-exp over everything the query sees (prefill_dense_lse); sums [B, T] float32, overwritten below stop.
    """
    if choose(path, q) == "reference":
        column_scores_ref(q, k, lse, stop, scale, sums)
    else:
        column_scores_blocks(q, k, lse, stop, scale, sums)


def column_scores_blocks(q, k, lse, stop, scale, sums):
    """`column_scores` in plain torch, ROWS rows of the past at a time, one K/V head after the other.

    The exponential is monotone, so the largest logit - lse over the heads is found first: one exponential per (query, row), not one
    per head.
    """
    batch, chunk, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    for b in range(batch):
        folded = q[b].view(chunk, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * chunk, dim)
        shift = -lse[b].t().reshape(kv_heads, group * chunk, 1)
        for first in range(0, stop, ROWS):
            last = min(stop, first + ROWS)
            best = None
            for h in range(kv_heads):
                logits = torch.mm(folded[h], k[b, h, first:last].t())
                most = torch.add(shift[h], logits, alpha=scale)                 # float32, whatever the product's dtype
                most = most.view(group, chunk, -1).amax(0) if group > 1 else most
                best = most if best is None else torch.maximum(best, most, out=best)
            sums[b, first:last] = best.exp_().sum(0)
