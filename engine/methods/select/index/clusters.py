"""k-means of keys by cosine, of many sets at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def nearest(keys: torch.Tensor, centroids: torch.Tensor) -> torch.Tensor:
    """Which centroid each key points to most alike: int64 [N, S], of equal ones the first.
    keys [N, S, D], centroids [N, C, D].
    """
    alike = F.normalize(keys, dim=-1) @ F.normalize(centroids, dim=-1).mT
    return alike.argmax(-1)


def cluster(keys: torch.Tensor, count: int, rounds: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Group the keys of every set, float32 [N, S, D], into `count` clusters: (which one each key is
    of, int64 [N, S]; the centroids [N, C, D], means of keys).

    Begins with keys at even distances. A cluster that has lost all its keys keeps its centroid.
    """
    first = torch.arange(count, device=keys.device) * keys.shape[1] // count
    centroids = keys[:, first]
    for _ in range(rounds):
        member = F.one_hot(nearest(keys, centroids), count).to(keys.dtype)
        sizes = member.sum(1).unsqueeze(-1)
        means = member.mT @ keys / sizes.clamp(min=1)
        centroids = torch.where(sizes > 0, means, centroids)
    return nearest(keys, centroids), centroids
