"""Softmax attention weights tile by tile, and their sums over queries: what every method that counts attention is made of.

Plain torch on any device. heads x queries x rows never exists: a tile is at most TILE floats. The sums are kept per query head, since
the published methods reduce over a group after they have summed; OmniKV's own scores (maximum over all heads first) are in
kernels/column_scores.py and kernels/window_scores.py.
"""

import torch

ROWS = 1024             # rows of a tile
TILE = 4 * 2 ** 20      # floats of a tile: 16 MB


def tiles(q, k, first):
    """(queries, rows) slices that cover what q [C, H, D] sees of k [Hkv, T, D], query j rows < first + j + 1; unseen tiles left out."""
    count, heads, _ = q.shape
    width = max(1, TILE // (heads * ROWS))
    for start in range(0, count, width):
        stop = min(count, start + width)
        for row in range(0, min(k.shape[1], first + stop), ROWS):
            yield slice(start, stop), slice(row, min(row + ROWS, k.shape[1], first + stop))


def tile_logits(q, k, queries, rows, first, scale):
    """Scaled logits of one tile, float32 [Hkv, G, queries, rows], -inf where a query does not see a row."""
    kv_heads, _, dim = k.shape
    part = q[queries].float().view(-1, kv_heads, q.shape[1] // kv_heads, dim).permute(1, 2, 0, 3)
    logits = torch.matmul(part.flatten(1, 2), k[:, rows].float().transpose(1, 2)) * scale
    logits = logits.view(*part.shape[:3], -1)
    if rows.stop > first + queries.start + 1:
        seen = torch.arange(queries.start, queries.stop, device=q.device) + first
        logits.masked_fill_(torch.arange(rows.start, rows.stop, device=q.device) > seen.unsqueeze(1), float("-inf"))
    return logits


def weight_tiles(q, k, first, scale, change=None):
    """Softmax weights of q [C, H, D] over the rows of k [Hkv, T, D] that each query sees (query j: rows < first + j + 1).

    Yields (queries slice, rows slice, float32 [Hkv, G, queries, rows]); two passes over K. change(logits, queries, rows) -> logits
    replaces what the softmax is taken of (Keyformer's noise and temperature); it is asked for every tile twice.
    """
    def logits_of(queries, rows):
        logits = tile_logits(q, k, queries, rows, first, scale)
        return logits if change is None else change(logits, queries, rows)

    kv_heads = k.shape[0]
    lse = torch.full((kv_heads, q.shape[1] // kv_heads, q.shape[0]), float("-inf"), device=q.device)
    for queries, rows in tiles(q, k, first):
        lse[:, :, queries] = torch.logaddexp(lse[:, :, queries], torch.logsumexp(logits_of(queries, rows), -1))
    for queries, rows in tiles(q, k, first):
        yield queries, rows, torch.exp(logits_of(queries, rows) - lse[:, :, queries].unsqueeze(-1))


def column_sums(q, k, first, scale, each=None, change=None):
    """float32 [Hkv, G, T]: sums over the queries of their weights on every row (of `each(weights, queries, rows)` where given).

    q [C, H, D] at the end of k [Hkv, T, D]: query j sees rows < first + j + 1. H2O's score (its section 3.2) for a chunk of queries.
    """
    kv_heads, total = k.shape[:2]
    sums = torch.zeros(kv_heads, q.shape[1] // kv_heads, total, device=q.device)
    for queries, rows, weights in weight_tiles(q, k, first, scale, change):
        sums[:, :, rows] += (weights if each is None else each(weights, queries, rows)).sum(2)
    return sums
