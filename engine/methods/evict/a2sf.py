"""A2SF: H2O whose scores forget, so that old tokens do not win by having been looked at for longer.

Source: Jo and Shin, A2SF (2024): S <- forgetting * S + attention of the new query; METHODS.md row
`a2sf`. In a prompt of N tokens query q weighs forgetting^(N-1-q). Defaults: the code's example,
forgetting 0.95 and the 16 newest tokens; scores are summed over a group, as in the code. With
forgetting 1 and H2O's other settings it is H2O.
"""

from dataclasses import dataclass

import torch

from engine.methods.evict.accumulated_scores import Accumulating, AccumulatingRuntime
from engine.methods.settings import portion, whole
from kernels.column_sums import column_sums


@dataclass(frozen=True)
class A2SF(Accumulating):
    """forgetting: factor per query, in [0, 1]. recent: newest tokens that are always kept (None:
    recent_share of the budget).
    """

    gqa_reduce: str = "sum"
    forgetting: float = 0.95
    newest: int | None = 16

    def __post_init__(self):
        super().__post_init__()
        portion("forgetting", self.forgetting, zero=True)
        if self.newest is not None:
            whole("newest", self.newest, 0)

    def recent(self, budget):
        """`newest`, at most the budget."""
        return super().recent(budget) if self.newest is None else min(self.newest, budget)

    def decay(self, count):
        """forgetting^count."""
        return float(self.forgetting) ** count

    def runtime(self, setup):
        """Stores and decaying sums."""
        return A2SFRuntime(self, setup)


class A2SFRuntime(AccumulatingRuntime):
    """A chunk's queries weigh by their age at its end; `commit` ages the rest."""

    def added(self, sequence, layer, number, q, k, first, start):
        """Column sums with weight forgetting^(C-1-j) for query j of C."""
        ages = torch.arange(len(q) - 1, -1, -1, device=q.device, dtype=torch.float32)
        weights = torch.pow(torch.tensor(float(self.method.forgetting), device=q.device), ages)
        return column_sums(
            q,
            k,
            first,
            self.scale,
            each=lambda tile, queries, rows: tile * weights[queries].unsqueeze(1),
        )
