"""What stands for a chunk of keys, and the chunks for which nothing can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional


def landmarks(keys: torch.Tensor, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean of each chunk of keys [Hkv, n * chunk, D], float32, and the least cosine that a
    member has with it: [Hkv, n, D], [Hkv, n].
    """
    members = keys.unflatten(1, (-1, chunk))
    means = members.mean(2)
    return means, functional.cosine_similarity(members, means.unsqueeze(2), dim=3).amin(2)


class Outliers(NamedTuple):
    """The chunks of each head whose least cosines are lowest, of equal ones the first: their
    cosines float32 and numbers int64 [Hkv, O], and their rows of K and V [Hkv, O, chunk, D].
    """

    cosines: torch.Tensor
    chunks: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


def furthest(found: Sequence[Outliers], most: int) -> Outliers:
    """The `most` outliers of those found, which follow each other in the text."""
    every = [torch.cat(parts, 1) for parts in zip(*found)]
    order = every[0].sort(dim=1, stable=True).indices[:, :most]
    head = torch.arange(len(order), device=order.device).unsqueeze(1)
    return Outliers(*(part[head, order] for part in every))
