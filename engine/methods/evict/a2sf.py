"""A2SF: H2O with scores that decay, so that old tokens do not win by having been seen for longer.

Source: Jo and Shin, A2SF (2024): S <- forgetting * S + attention of the new query. In a prompt of N
tokens query q weighs forgetting^(N-1-q). Defaults: the code's example, forgetting 0.95 and the 16
newest tokens; scores are summed over a group, as in the code. With forgetting 1 and H2O's other
settings it is H2O.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.base.checks import fraction, integer
from engine.methods.base import Runtime, Setup
from engine.methods.evict.shared.accumulated_scores import Accumulating, AccumulatingRuntime


@dataclass(frozen=True)
class A2SF(Accumulating):
    """forgetting: factor per query, in [0, 1]. newest: newest tokens that are always kept, at most
    the budget (None: recent_share of the budget).
    """

    full_prompts = True

    gqa_reduce: str = "sum"
    forgetting: float = 0.95
    newest: int | None = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction("forgetting", self.forgetting, zero=True)
        if self.newest is not None:
            integer("newest", self.newest, 0)

    def recent(self, budget: int) -> int:
        return super().recent(budget) if self.newest is None else min(self.newest, budget)

    def decay(self, count: int) -> float:
        return float(self.forgetting) ** count

    def runtime(self, setup: Setup) -> Runtime:
        return A2SFRuntime(self, setup)


class A2SFRuntime(AccumulatingRuntime):
    """A chunk's queries weigh by their age at its end; older scores decay when it is committed."""

    method: A2SF

    def added(
        self,
        b: int,
        layer: int,
        number: int,
        q: torch.Tensor,
        k: torch.Tensor,
        first: int,
        start: int,
    ) -> torch.Tensor:
        """Query j of C weighs forgetting^(C-1-j)."""
        if len(q) == 1:
            return self.column_sums(layer, q, k, first)
        ages = torch.arange(len(q) - 1, -1, -1, device=q.device, dtype=torch.float32)
        weights = torch.pow(torch.tensor(float(self.method.forgetting), device=q.device), ages)
        return self.column_sums(
            layer,
            q,
            k,
            first,
            each=lambda tile, queries, rows: tile * weights[queries].unsqueeze(1),
        )
