"""FastGen's policies: which tokens of a K/V head each keeps, cheapest first, and which will do."""

from __future__ import annotations

import math

import torch

from engine.methods.evict.shared.store import best

# each keeps what those before it keep, too
SPECIAL, PUNCTUATION, FREQUENT, LOCAL, EVERYTHING = range(5)
NAMES = ("special", "punctuation", "frequent", "local", "full")
POLICIES = len(NAMES)


def kept(
    policy: int,
    kinds: torch.Tensor,
    positions: torch.Tensor,
    scores: torch.Tensor,
    length: int,
    frequent: float,
    local: float,
) -> torch.Tensor:
    """Which tokens a policy keeps, bool [h, T]. kinds int8 [h, T]: 2 of special tokens, 1 of
    punctuation, 0 of others; positions int [h, T]; scores float32 [h, T]: attention received;
    length: tokens of the sequence; frequent, local: parts of those.
    """
    found = kinds == 2
    if policy >= PUNCTUATION:
        found = found | (kinds == 1)
    if policy >= FREQUENT:
        some = best(scores, positions, min(math.floor(frequent * length), scores.shape[1]))
        found = found.scatter(1, some, True)
    if policy >= LOCAL:
        found = found | (positions >= length - math.floor(local * length))
    return torch.ones_like(found) if policy == EVERYTHING else found


def chosen(lost: torch.Tensor, eps: float) -> list[int]:
    """The first policy of each head whose loss [POLICIES, h] is at most eps; of 0 the last."""
    enough = (lost <= eps) & (eps > 0)
    enough[EVERYTHING] = True
    return enough.int().argmax(0).tolist()
