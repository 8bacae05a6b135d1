"""Scissorhands: what was above average lately stays important; many tokens are dropped at once when
the budget is full.

Source: Liu et al., Scissorhands (NeurIPS 2023), Algorithm 2. A token's importance is how many of
the last queries gave it more than an even share of their attention, 1 / (tokens they saw). History:
the prompt's last `history` queries, and of an answer the last `history` before a drop. At a
prompt's end a head keeps its budget; when the answer overfills it, `drop` of the budget goes at
once, never the `newest` tokens. History 400, newest 10 and drop one half are the values usually
quoted for the paper's experiments; they were not checked against its text. gqa_reduce: the counts
of a group are summed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from engine.methods.evict.accumulated_scores import Accumulating, AccumulatingRuntime
from engine.methods.evict.store import Rows, Sequence, best
from engine.settings import fraction, integer
from kernels.column_sums import column_sums

if TYPE_CHECKING:
    from engine.methods.base import Runtime, Setup
    from engine.model.config import ModelConfig
    from engine.plan.layers import LayerPlan
    from engine.plan.needs import Needs


@dataclass(frozen=True)
class Scissorhands(Accumulating):
    """history: queries whose attention counts. newest: tokens that are never dropped. drop: share
    of the budget dropped at once.
    """

    gqa_reduce: str = "sum"
    history: int = 400
    newest: int = 10
    drop: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("history", self.history, 1)
        integer("newest", self.newest, 0)
        fraction("drop", self.drop)

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        # in a call that does not end the prompt nothing counts yet
        return replace(super().needs(plan, config, capacity, itemsize), final_call=self.history)

    def recent(self, budget: int) -> int:
        return min(self.newest, budget)

    def target(self, budget: int) -> int:
        """Tokens that are left after a drop: at least one goes, at least one stays."""
        dropped = max(1, int(self.drop * budget))
        return max(1, self.recent(budget), min(budget, budget + 1 - dropped))

    def course(self, budget: int, length: int, generated: int) -> tuple[int, int]:
        base = held = min(length, budget)
        for _ in range(generated):
            held += 1
            if held > budget:
                base = held = self.target(budget)
        return base, held

    def runtime(self, setup: Setup) -> Runtime:
        return ScissorhandsRuntime(self, setup)


class ScissorhandsRuntime(AccumulatingRuntime):
    """Scores are counts; they start from zero after a drop."""

    method: Scissorhands

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
        """1 for every query of the history that gave a token more than an even share."""
        history, sequence = self.method.history, self.sequences[b]
        # in a prompt: the first position that counts
        late = self.total - history
        if not self.reading and sequence.layers is not None:
            # steps after this one until the next drop
            left = sequence.budgets[layer] - sequence.layers[layer][number].held
            late = start if left < history else start + 1

        def above(tile: torch.Tensor, queries: slice, rows: slice) -> torch.Tensor:
            """Whether weights [h, G, queries, rows] are above 1 / (tokens seen)."""
            at = torch.arange(queries.start, queries.stop, device=tile.device)
            return (tile * (first + 1 + at).unsqueeze(1) > 1).float()

        # queries at the front that do not count
        idle = int(min(len(q), max(0, late - start)))
        q, first = q[idle:], first + idle
        return column_sums(q, k, first, self.scale, each=above)

    def trim(self, rows: Rows, budget: int, sequence: Sequence) -> Rows:
        """A full store drops many at once, and counts from zero."""
        if rows.held <= budget:
            return rows
        part = rows.part()
        scores = self.ranked(part, sequence.length, budget)
        index = best(scores, part.positions, self.method.target(budget))
        rows = Rows.gather(part, index, self.method.max_rows(budget))
        assert rows.scores is not None
        rows.scores.zero_()
        return rows
