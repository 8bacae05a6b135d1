"""Scissorhands: what was above average lately stays important; many tokens are dropped at once when
the store is full.

Source: Liu et al., Scissorhands (NeurIPS 2023), Algorithm 2. Every query that gives a token less
than an even share of its attention, 1 / (tokens it saw), counts against it; the largest counts go,
of equal ones the older, never the `newest` tokens. A token that few queries have seen has few
counts against it. Counts start anew at each cut, and of the queries since then the last `history`
before the next cut count; the published window reaches back over a cut.

The budget is what each cut leaves, at a prompt's end and in an answer. The answer adds to it until
a drop would be the share `drop` of all, and one drop takes that back. The paper calls the most that
is ever held its budget: tokens=(1 - drop) B here is its B. History 400, newest 10 and drop one half
are the values usually quoted for its experiments; they were not checked against its text.
gqa_reduce: the counts of a group are summed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from engine.bank.base import Step
from engine.base.checks import fraction, integer
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.evict.shared.accumulated_scores import Accumulating, AccumulatingRuntime
from engine.methods.evict.shared.store import Rows, Sequence, best
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs


@dataclass(frozen=True)
class Scissorhands(Accumulating):
    """Budget: the tokens that each cut leaves. history: queries whose attention counts. newest:
    tokens that are never dropped. drop: share of a full store that is dropped at once, below 1.
    """

    full_prompts = True

    gqa_reduce: str = "sum"
    history: int = 400
    newest: int = 10
    drop: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("history", self.history, 1)
        integer("newest", self.newest, 0)
        fraction("drop", self.drop)
        if self.drop == 1:
            raise SettingError("drop: found 1, expected a share below 1, so that something stays")

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        # in a call that does not end the prompt nothing counts yet
        return replace(super().needs(plan, config, capacity, itemsize), final_call=self.history)

    def recent(self, budget: int) -> int:
        return min(self.newest, budget)

    def most(self, budget: int) -> int:
        """Tokens that a store of this budget grows to before it is cut again."""
        return max(budget + 1, math.floor(budget / (1 - self.drop)))

    def max_rows(self, budget: int) -> int | None:
        """The most that is held, and the token of the step that fills it."""
        return self.most(budget) + 1

    def course(self, budget: int, length: int, generated: int) -> tuple[int, int]:
        base = held = min(length, budget)
        for _ in range(generated):
            held += 1
            if held > self.most(budget):
                base = held = budget
        return base, held

    def runtime(self, setup: Setup) -> Runtime:
        return ScissorhandsRuntime(self, setup)


class ScissorhandsRuntime(AccumulatingRuntime):
    """Scores are minus the counts; they start from zero after each cut."""

    method: Scissorhands

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        super().end_prompt(length, step)
        for parts in self.sequences[0].layers or () if step is not None else ():
            for rows in parts:
                restart(rows)

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
        """-1 for every query of the history that gave a token less than an even share."""
        history, sequence = self.method.history, self.sequences[b]
        # in a prompt: the first position that counts
        late = self.total - history
        if not self.reading and sequence.layers is not None:
            # steps after this one until the next drop
            held = sequence.layers[layer][number].held
            left = self.method.most(sequence.budgets[layer]) - held
            late = start if left < history else start + 1

        def below(tile: torch.Tensor, queries: slice, rows: slice) -> torch.Tensor:
            """Minus whether weights [h, G, queries, rows] of rows that a query sees are below
            1 / (tokens seen).
            """
            at = torch.arange(queries.start, queries.stop, device=tile.device)
            seen = (first + 1 + at).unsqueeze(1)
            there = torch.arange(rows.start, rows.stop, device=tile.device) < seen
            return ((tile * seen < 1) & there).float().neg_()

        # queries at the front that do not count
        idle = int(min(len(q), max(0, late - start)))
        q, first = q[idle:], first + idle
        return self.column_sums(layer, q, k, first, each=below)

    def trim(self, rows: Rows, budget: int, sequence: Sequence, layer: int) -> Rows:
        """A full store drops many at once, and counts from zero."""
        if rows.held <= self.method.most(budget):
            return rows
        part = rows.part()
        scores = self.ranked(part, sequence.length, budget)
        index = best(scores, part.positions, budget)
        return restart(Rows.gather(part, index, self.method.max_rows(budget)))


def restart(rows: Rows) -> Rows:
    """The rows, with their counts at zero."""
    assert rows.scores is not None
    rows.scores.zero_()
    return rows
