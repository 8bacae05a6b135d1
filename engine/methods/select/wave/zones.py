"""The zones of a wave index: which clusters a step reads, and which it estimates. A pure function;
no model, no bank.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

NOTHING = float("-inf")  # score of an empty cluster; log of how often a row counts that is none


class Zones(NamedTuple):
    """Of every K/V head: tokens int32 [Hkv] of the clusters that are read; place int64 [Hkv, C] of
    every cluster in the head's ranking; estimated int64 [Hkv, E], the clusters that are, and logs
    float32 [Hkv, E] of their tokens, -inf where there is none.
    """

    tokens: torch.Tensor
    place: torch.Tensor
    estimated: torch.Tensor
    logs: torch.Tensor


def zones_of(scores: torch.Tensor, sizes: torch.Tensor, room: int, most: int) -> Zones:
    """Read the clusters of the highest scores [Hkv, C] as long as their sizes int32 [Hkv, C] fit
    into `room` tokens, and estimate the `most` that follow. Of equal scores the first is better;
    what is empty comes last.
    """
    count = scores.shape[1]
    ranked = scores.masked_fill(sizes == 0, NOTHING).argsort(dim=1, descending=True, stable=True)
    held = sizes.gather(1, ranked)
    reads = held.cumsum(1) <= room
    places = torch.arange(count, device=scores.device).expand_as(ranked)
    place = torch.empty_like(ranked).scatter_(1, ranked, places)
    following = reads.sum(1, keepdim=True) + torch.arange(most, device=scores.device)
    estimated = ranked.gather(1, following.clamp(max=max(0, count - 1)))
    logs = sizes.gather(1, estimated).log().masked_fill(following >= count, NOTHING)
    return Zones((held * reads).sum(1).int(), place, estimated, logs)
