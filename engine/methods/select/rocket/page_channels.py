"""Bounds on the logits of pages from few channels: what RocketKV ranks pages by.

The extremes of K in a page are held channel by channel, so that a channel of all pages is one run.
"""

from __future__ import annotations

import torch


def extremes(keys: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest of each channel in each page of keys [Hkv, n * page, D]: [Hkv, D,
    n] each.
    """
    pages = keys.unflatten(1, (-1, page))
    return pages.amin(2).mT, pages.amax(2).mT


def bounds(q: torch.Tensor, low: torch.Tensor, high: torch.Tensor, count: int) -> torch.Tensor:
    """The part of a bound on q . k that a K/V head's `count` channels give: of those in which its
    query heads are largest together, by the sum of their |q|. q float32 [Hkv, G, D]; low, high
    [Hkv, D, n] -> float32 [Hkv, G, n].
    """
    heads, dim, _ = low.shape
    largest = q.abs().sum(1).topk(count, -1).indices  # [Hkv, count]
    few = q.gather(2, largest.unsqueeze(1).expand(-1, q.shape[1], -1))
    rows = (largest + dim * torch.arange(heads, device=q.device).unsqueeze(1)).flatten()
    least, most = (side.flatten(0, 1)[rows].float().view(heads, count, -1) for side in (low, high))
    return few.clamp(min=0) @ most + few.clamp(max=0) @ least
