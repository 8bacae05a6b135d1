"""A choice by an index of K by torch's operators, as kernels/index/choose.py says what it is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.index.indexes import Channels, Codes, Ends

AT_ONCE = 4096  # tokens whose channels or codes are taken at a time
TINY = 1e-30  # what sums of |q| are at least


def grouped(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Queries [H, D] by K/V head: float32 [Hkv, G, D]."""
    return q.float().view(kv_heads, -1, q.shape[-1])


def reduced(scores: torch.Tensor, how: str) -> torch.Tensor:
    """Scores [Hkv, G, n] of query heads as the choices rank them: [choices, n]. how: of REDUCE."""
    if how == "none":
        return scores.flatten(0, 1)
    if how == "max":
        return scores.amax(1)
    return scores.mean(1) if how == "mean" else scores.sum(1)


def _of_heads(of: torch.Tensor, b: int, heads: int) -> torch.Tensor:
    """Sequence b's rows [H, T] by K/V head."""
    return of[b].view(heads, -1, of.shape[2])


def channels_by_torch(
    index: Channels,
    q: torch.Tensor,
    lengths: Sequence[int],
    ends: Ends,
    newest: int,
    backend: str,
) -> None:
    """`choose_by_channels` by torch's operators, q [B, H, D]: writes the index's logits, scores,
    chosen tokens, counts and weights. lengths: tokens of each sequence; newest: those that a choice
    is weighed with. Raises ValueError for an unknown backend.
    """
    heads, scores = index.rows.shape[1], index.scores.view(len(q), -1, index.scores.shape[1])
    held = scores if index.logits is None else index.logits
    for b, n in enumerate(lengths):
        asked, found = grouped(q[b], heads), _of_heads(held, b, heads)[:, :, :n]
        if index.channels is None:
            few, rows = _largest(asked, index.r)
        else:
            few = _at_channels(asked, index.channels)
            rows = torch.arange(few.shape[2], device=few.device).expand(heads, -1)
        _channel_logits(few * index.scale, rows, index.rows[b], found)
        if held is not scores:
            scores[b, :, :n] = reduced(found, index.reduce)
    index.take(ends, backend)
    if index.weights is None:
        return
    for b, n in enumerate(lengths):
        shares = _of_heads(held, b, heads)[:, :, :n].softmax(-1)
        own = slice(b * heads, (b + 1) * heads)
        at = index.chosen[own, :n].long().unsqueeze(1).expand(-1, shares.shape[1], -1)
        counted = torch.arange(at.shape[2], device=at.device) < ends.counts[own, None, None]
        read = (shares.gather(2, at.clamp(min=0)) * counted).sum(-1)
        index.weights[b] = (read + shares[:, :, max(0, n - newest) :].sum(-1)).flatten()


def _largest(asked: torch.Tensor, r: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries [Hkv, G, D] at the r channels where they are largest, by the root of their part of
    |q|, and these channels [Hkv, r], ascending.
    """
    sizes = asked.abs()
    order = sizes.sum(1).sort(dim=-1, descending=True, stable=True).indices
    channels = order[:, :r].sort(-1).values
    few = _at_channels(asked, channels)
    cover = few.abs().sum(-1, keepdim=True) / sizes.sum(-1, keepdim=True).clamp(min=TINY)
    return few * cover.clamp(min=TINY).rsqrt(), channels


def _at_channels(asked: torch.Tensor, channels: torch.Tensor) -> torch.Tensor:
    """Queries [Hkv, G, D] at channels [Hkv, r]: [Hkv, G, r]."""
    return asked.gather(2, channels.unsqueeze(1).expand(-1, asked.shape[1], -1))


def _channel_logits(
    few: torch.Tensor, channels: torch.Tensor, by_channel: torch.Tensor, out: torch.Tensor
) -> None:
    """out[h, g, t] = the sum over i of few[h, g, i] * by_channel[h, channels[h, i], t].

    few float32 [Hkv, G, r]; channels int64 [Hkv, r]; by_channel [Hkv, rows, >= n]; out float32
    [Hkv, G, n].
    """
    heads, dim, _ = by_channel.shape
    rows = channels + dim * torch.arange(heads, device=few.device).unsqueeze(1)
    keys, n = by_channel.flatten(0, 1), out.shape[2]
    for first in range(0, n, AT_ONCE):
        part = slice(first, min(n, first + AT_ONCE))
        some = keys[rows.flatten(), part].to(few.dtype).unflatten(0, rows.shape)
        out[:, :, part] = few @ some


def codes_by_torch(
    index: Codes,
    q: torch.Tensor,
    stops: Sequence[int],
    ends: Ends,
    known: int,
    backend: str,
) -> None:
    """`choose_by_codes` by torch's operators, q [B, H, D]: writes the index's logits, scores,
    chosen tokens and counts. stops: one past the last token of each sequence that has a code;
    known: centroids of a part that there are. Raises ValueError for an unknown backend.
    """
    first, (heads, parts) = index.first, index.codes.shape[1:3]
    scores = index.scores.view(len(q), heads, -1)
    scores[:, :, :first] = float("inf")
    for b, n in enumerate(stops):
        between = slice(first, max(first, n))
        asked = grouped(q[b], heads).unflatten(2, (parts, -1)).transpose(1, 2)
        centroids = index.centroids[b, :, :, :known].to(asked.dtype)
        table = asked @ centroids.mT * index.scale  # [Hkv, parts, G, known]
        own, some = scores[b, :, between], index.codes[b, :, :, between]
        if index.logits is None:
            table = reduced(table[:, 0], index.reduce)[:, None, None]
            _code_logits(table, some, own.unsqueeze(1))
        else:
            found = _of_heads(index.logits, b, heads)[:, :, between]
            _code_logits(table, some, found)
            own.copy_(reduced(found.softmax(-1), index.reduce))
    index.take(ends, backend)


def _code_logits(table: torch.Tensor, codes: torch.Tensor, out: torch.Tensor) -> None:
    """out[h, g, t] = the sum over p of table[h, p, g, codes[h, p, t]].

    table float32 [Hkv, parts, G, C]; codes [Hkv, parts, >= n]; out float32 [Hkv, G, n].
    """
    n = out.shape[2]
    for first in range(0, n, AT_ONCE):
        part = slice(first, min(n, first + AT_ONCE))
        some = codes[:, :, part].long().unsqueeze(2).expand(-1, -1, table.shape[2], -1)
        out[:, :, part] = table.gather(3, some).sum(1)
