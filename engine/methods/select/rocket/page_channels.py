"""The extremes of K in a page, channel by channel, so that a channel of all pages is one run: what
RocketKV's bounds are made of.
"""

from __future__ import annotations

import torch


def extremes(keys: torch.Tensor, page: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest of each channel in each page of keys [Hkv, n * page, D]: [Hkv, D,
    n] each.
    """
    pages = keys.unflatten(1, (-1, page))
    return pages.amin(2).mT, pages.amax(2).mT
