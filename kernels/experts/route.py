"""How a router's logits become a choice of experts and its shares, where it is not the softmax that
`best_experts` (kernels/experts/choose.py) takes: sigmoids, a correction of the choice, groups.

DeepSeek-V2 (arXiv 2405.04434, section 2.2.2) takes experts of the best groups only, by each group's
best expert. DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) scores by sigmoids, ranks by scores to
which a learned correction is added, and groups by the sum of their two best.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from kernels.experts.choose import Choice


class Routing(NamedTuple):
    """sigmoid: scores are sigmoids of the logits, else their softmax over all experts. groups: of
    neighbours among the experts, of which a token takes its own from the best `kept`; 1: there are
    none. ranked: experts whose scores, added, rank a group. factor: of all shares. corrected:
    whether a learned correction is added to the scores that rank.
    """

    sigmoid: bool = False
    groups: int = 1
    kept: int = 1
    ranked: int = 1
    factor: float = 1.0
    corrected: bool = False

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Routing:
        """The routing whose fields are these numbers."""
        sigmoid, groups, kept, ranked, factor, corrected = numbers
        return cls(bool(sigmoid), int(groups), int(kept), int(ranked), factor, bool(corrected))


def router_logits(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Multiply rows x [T, hidden] by a router's matrix [E, hidden]: float32 [T, E], since scores
    that differ little choose.
    """
    return torch.nn.functional.linear(x.float(), matrix.float())


def route_experts(
    logits: torch.Tensor,
    per_token: int,
    normalise: bool,
    routing: Routing,
    correction: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose per row of logits [T, E]: (shares float32, ids int64), both [T, per_token], in no
    order. The host waits for nothing.

    correction: float32 [E] or None. Scores are float32 (float64 of float64 logits). normalise:
    shares of a row sum to the factor.
    """
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    scores = wide.sigmoid() if routing.sigmoid else wide.softmax(-1)
    ranks = scores if correction is None else scores + correction
    if routing.groups > 1:
        grouped = ranks.unflatten(-1, (routing.groups, -1))
        best = grouped.topk(routing.ranked, dim=-1)[0].sum(-1)
        left = best.topk(routing.kept, dim=-1, sorted=False)[1]
        taken = torch.zeros_like(best, dtype=torch.bool).scatter_(1, left, True)
        ranks = grouped.masked_fill(~taken[..., None], float("-inf")).flatten(1)
    ids = ranks.topk(per_token, dim=-1, sorted=False)[1]
    shares = scores.gather(1, ids)
    if normalise:
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
    return shares * routing.factor, ids


def listed(shares: torch.Tensor, ids: torch.Tensor, count: int) -> Choice:
    """Return what rows chose of `count` experts, shares and ids [R, per_token] of `route_experts`,
    as the products of a step read it (kernels/experts/choose.py). The host waits for nothing.
    """
    rows, per_token = ids.shape
    room = min(count, rows * per_token)
    every = shares.new_zeros(rows, count).scatter_(1, ids, shares)
    taken = torch.zeros_like(every, dtype=torch.int32).scatter_(1, ids, 1)
    place = torch.arange(rows, device=ids.device, dtype=torch.int32)
    bits = (taken << place[:, None]).sum(0, dtype=torch.int32)
    used = bits != 0
    # experts that nobody chose go behind the room
    at = torch.where(used, used.cumsum(0) - 1, room)
    numbers = torch.arange(count, device=ids.device, dtype=torch.int32)
    return Choice(
        ids.new_zeros(room + 1, dtype=torch.int32).scatter_(0, at, numbers)[:room],
        ids.new_zeros(room + 1, dtype=torch.int32).scatter_(0, at, bits)[:room],
        shares.new_zeros(room + 1, rows).index_copy_(0, at, every.t().contiguous())[:room],
        used.sum(dtype=torch.int32).view(1),
    )
