"""The skew of a layer: a turn of queries and keys that leaves their logits and gathers what they
have into few columns.
"""

from __future__ import annotations

import torch


def skewed(layer: int, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """An orthogonal matrix of each K/V head, on the CPU: float32 [Hkv, D, D], its columns by what
    they carry, the most first.

    q [S, H, D] and k [Hkv, S, D], both rotated, of S tokens. The columns are the right singular
    vectors of a head's queries; one carries the sum of the sizes that queries (the mean over the
    group's heads) and keys have in it.
    """
    heads, _, dim = k.shape
    asked = q.double().cpu().unflatten(1, (heads, -1)).permute(1, 2, 0, 3)  # [Hkv, G, S, D]
    rows = asked.flatten(1, 2)
    vectors = torch.linalg.eigh(rows.mT @ rows).eigenvectors
    sizes = (rows @ vectors).abs().sum(1) / asked.shape[1]
    sizes += (k.double().cpu() @ vectors).abs().sum(1)
    order = sizes.argsort(dim=1, descending=True, stable=True)
    return vectors.gather(2, order.unsqueeze(1).expand(-1, dim, -1)).float()
