"""Eviction in the answer too, every so many tokens: what R-KV, VaSE and random eviction share.

A prompt's end leaves the budget. The answer adds `every` tokens to it, and then one cut takes as
many back. Nothing is remembered of a token but its K and V, so that what it is worth is asked anew
at each cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.bank.base import Step
from engine.base.checks import integer
from engine.methods.base import Setup
from engine.methods.evict.shared.runtime import EvictingRuntime
from engine.methods.evict.shared.settings import Evicting
from engine.methods.evict.shared.store import Rows, Sequence, best


@dataclass(frozen=True)
class Periodic(Evicting):
    """every: tokens of an answer between two cuts, for which a store has room beside its budget."""

    every: int = 64

    named = False

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("every", self.every, 1)

    def max_rows(self, budget: int) -> int | None:
        """The budget, and the tokens that come before the next cut."""
        return budget + self.every

    def course(self, budget: int, length: int, generated: int) -> tuple[int, int]:
        held, over = min(length, budget), min(length, budget) + generated - budget
        if over < self.every:
            return held, held + generated
        return budget, budget + over % self.every


class PeriodicRuntime(EvictingRuntime):
    """A store is cut to its budget by `rank`, with the newest token's step."""

    method: Periodic

    def __init__(self, method: Evicting, setup: Setup):
        super().__init__(method, setup)
        self.step: Step | None = None  # the step under way

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Keep the step for the cut that may follow."""
        self.step = step
        return super().attend(layer, q, step)

    def commit(self, count: int) -> None:
        super().commit(count)
        self.step = None

    def trim(self, rows: Rows, budget: int, sequence: Sequence, layer: int) -> Rows:
        if rows.held < budget + self.method.every:
            return rows
        part = rows.part()
        scores = self.rank(sequence, layer, part, self.step)
        index = best(scores, part.positions, rows.held - self.method.every)
        return Rows.gather(part, index, self.method.max_rows(budget))
