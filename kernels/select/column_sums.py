"""Softmax attention weights tile by tile, and their sums over queries, for the methods that sum
attention.

Plain torch on any device. The heads x queries x rows tensor never exists: a tile has at most
`tile_floats` elements. Sums are kept per query head, because the published methods reduce over a
group after they have summed. OmniKV takes the maximum over all heads first, in
kernels/select/column_scores.py and kernels/select/window_scores.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kernels.attention.cpu import in_float32
from kernels.launch.softmax import PLAIN, Softmax

Change = Callable[[torch.Tensor, slice, slice], torch.Tensor]  # (tile, queries, rows) -> tile

# the least of a tile, where there are as many
QUERIES, ROWS = 16, 1024
# floats of a tile; 1 MB stays in a core's cache: 5 times faster than 16
TILES = {"cpu": 2**18, "cuda": 4 * 2**20}


def tile_floats(device: torch.device) -> int:
    """Bound the elements of a tile on a device."""
    return TILES.get(device.type, TILES["cuda"])


def tiles(q: torch.Tensor, k: torch.Tensor, first: int) -> Iterator[tuple[slice, list[slice]]]:
    """Cover what q [C, H, D] sees of k [Hkv, T, D], where query j sees rows < first + j + 1.

    Yields (queries, [rows, ...]) as slices.
    """
    count, heads, _ = q.shape
    size = tile_floats(q.device)
    high = max(ROWS, size // (heads * QUERIES))
    width = max(1, size // (heads * min(high, k.shape[1])))
    for start in range(0, count, width):
        stop = min(count, start + width)
        end = min(k.shape[1], first + stop)
        yield slice(start, stop), [slice(row, min(row + high, end)) for row in range(0, end, high)]


def tile_logits(
    q: torch.Tensor,
    k: torch.Tensor,
    queries: slice,
    rows: slice,
    first: int,
    scale: float,
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """Compute the scaled and capped logits of one tile: float32 [Hkv, G, queries, rows], -inf where
    a query does not see a row.
    """
    kv_heads, dim = len(k), q.shape[-1]
    part = q[queries].float().view(-1, kv_heads, q.shape[1] // kv_heads, dim).permute(1, 2, 0, 3)
    logits = torch.matmul(part.flatten(1, 2), in_float32(k[:, rows]).transpose(1, 2)) * scale
    logits = softmax.capped(logits).view(*part.shape[:3], -1)
    if rows.stop > first + queries.start + 1:
        seen = torch.arange(queries.start, queries.stop, device=q.device) + first
        logits.masked_fill_(
            torch.arange(rows.start, rows.stop, device=q.device) > seen.unsqueeze(1), float("-inf")
        )
    return logits


def weight_tiles(
    q: torch.Tensor,
    k: torch.Tensor,
    first: int,
    scale: float,
    change: Change | None = None,
    softmax: Softmax = PLAIN,
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Yield the softmax weights of q [C, H, D] over the rows of k [Hkv, T, D], tile by tile.

    Query j sees rows < first + j + 1. Yields (queries, rows, weights float32
    [Hkv, G, queries, rows]). change(logits, queries, rows) replaces the logits before the softmax
    (Keyformer's noise and temperature). If queries see more rows than a tile holds, K is read twice
    and `change` is called twice for every tile. softmax: a cap on logits, before `change`, and
    sinks, which take their part of every query's weight.
    """

    def logits_of(queries: slice, rows: slice) -> torch.Tensor:
        logits = tile_logits(q, k, queries, rows, first, scale, softmax)
        return logits if change is None else change(logits, queries, rows)

    for queries, parts in tiles(q, k, first):
        if len(parts) == 1:
            yield queries, parts[0], softmax.grouped(logits_of(queries, parts[0]))
            continue
        lse = torch.logsumexp(
            torch.stack([torch.logsumexp(logits_of(queries, rows), -1) for rows in parts]), 0
        ).unsqueeze(-1)
        lse = softmax.joined(lse)
        for rows in parts:
            yield queries, rows, logits_of(queries, rows).sub_(lse).exp_()


def column_sums(
    q: torch.Tensor,
    k: torch.Tensor,
    first: int,
    scale: float,
    each: Change | None = None,
    change: Change | None = None,
    logits: torch.Tensor | None = None,
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """Sum over the queries their weights on every row: H2O's score (its section 3.2) for a chunk.

    q [C, H, D] at the end of k [Hkv, T, D]: query j sees rows < first + j + 1. each(weights,
    queries, rows) replaces the weights before they are summed; change and softmax as in
    `weight_tiles`. logits: of one query, capped already, which attention has left
    (kernels.attention.dense.py); K is not read then.
    Returns float32 [Hkv, G, T].
    """
    if logits is not None:
        queries, rows = slice(0, 1), slice(0, k.shape[1])
        weights = softmax.grouped(logits if change is None else change(logits, queries, rows))
        return (weights if each is None else each(weights, queries, rows)).squeeze(2)
    kv_heads, total = k.shape[:2]
    sums = torch.zeros(kv_heads, q.shape[1] // kv_heads, total, device=q.device)
    for queries, rows, weights in weight_tiles(q, k, first, scale, change, softmax):
        sums[:, :, rows] += (weights if each is None else each(weights, queries, rows)).sum(2)
    return sums


def column_maxima(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float
) -> torch.Tensor:
    """Take the largest weight of every row over the queries of a group: KVzip's score.

    Every query of q [C, H, D] sees all of k [Hkv, T, D]; lse float32 [C, H]: log-sum-exp of its
    logits, over these rows and others. Returns float32 [Hkv, T].
    """
    kv_heads, total = k.shape[:2]
    largest = torch.full((kv_heads, total), float("-inf"), device=q.device)
    # one more element of a head: the product is the weight's logarithm
    wide = torch.cat([q.float() * scale, -lse.unsqueeze(-1)], -1)
    wide = wide.view(len(q), kv_heads, -1, wide.shape[-1]).permute(1, 2, 0, 3)
    for queries, parts in tiles(q, k, total):
        for rows in parts:
            keys = in_float32(k[:, rows])
            keys = torch.cat([keys, torch.ones_like(keys[..., :1])], -1).transpose(1, 2)
            found = torch.matmul(wide[:, :, queries].flatten(1, 2), keys).amax(1)
            mine = largest[:, rows]
            torch.maximum(mine, found, out=mine)
    return largest.exp_()
