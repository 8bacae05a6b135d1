"""k-means of many sets of vectors at once, by cosine or by distance."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def nearest(keys: torch.Tensor, centroids: torch.Tensor, cosine: bool) -> torch.Tensor:
    """Which centroid is nearest to each key: int64 [N, S], of equal ones the first. keys [N, S, D],
    centroids [N, C, D].
    """
    if cosine:
        near = F.normalize(keys, dim=-1) @ F.normalize(centroids, dim=-1).mT
    else:  # |k - c|^2 is least where k c - |c|^2 / 2 is largest
        near = keys @ centroids.mT - centroids.square().sum(-1).unsqueeze(1) / 2
    return near.argmax(-1)


def cluster(
    keys: torch.Tensor, count: int, rounds: int, cosine: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group the keys of every set, float32 [N, S, D], into `count` clusters: (which one each key is
    of, int64 [N, S]; the centroids [N, C, D], means of keys).

    Begins with keys at even distances in the text. A cluster that has lost all its keys keeps its
    centroid.
    """
    first = torch.arange(count, device=keys.device) * keys.shape[1] // count
    centroids = keys[:, first]
    for _ in range(rounds):
        member = F.one_hot(nearest(keys, centroids, cosine), count).to(keys.dtype)
        sizes = member.sum(1).unsqueeze(-1)
        means = member.mT @ keys / sizes.clamp(min=1)
        centroids = torch.where(sizes > 0, means, centroids)
    return nearest(keys, centroids, cosine), centroids
