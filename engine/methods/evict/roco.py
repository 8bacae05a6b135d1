"""RoCo: evict what receives little attention on the mean, but not where that attention varies much.

Source: Ren and Zhu, On the Efficacy of Eviction Policy (2024), by its abstract and the code of
EasyKV. Each token keeps the mean and the standard deviation of the attention that it has received,
over all queries that saw it; over a group the weights are averaged first. Of a full store the
tokens of the largest deviation, 30% of the budget, and the newest 10 stay; of the others those of
the smallest mean go. A prompt is read by full attention and cut once; the code evicts in it as it
goes, `stride` tokens at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.base.checks import integer
from engine.methods.base import Runtime, Setup
from engine.methods.evict.shared.accumulated_scores import Accumulating, AccumulatingRuntime
from engine.methods.evict.shared.store import Part, Rows, Sequence
from engine.model.config.config import ModelConfig
from kernels.select.column_sums import weight_tiles
from kernels.select.drop import Steady, add_moments, reduce_group, steady_ranks


@dataclass(frozen=True)
class RoCo(Accumulating):
    """newest: newest tokens that stay, at most the budget. recent_share: part of the budget that is
    kept for a large deviation, the newest among it. gqa_reduce: of a group's weights, before they
    are counted.
    """

    full_prompts = True

    recent_share: float = 0.3
    gqa_reduce: str = "mean"
    newest: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("newest", self.newest, 0)

    def recent(self, budget: int) -> int:
        return min(self.newest, budget)

    def scores_of(self, config: ModelConfig) -> int:
        """The sum of weights, and that of their squares."""
        return 2

    def runtime(self, setup: Setup) -> Runtime:
        return RoCoRuntime(self, setup)


class RoCoRuntime(AccumulatingRuntime):
    """A token has been seen by every query since it came, while it stays."""

    method: RoCo

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
        """Sums of the queries' weights and of their squares [h, 2, T]; of a step that left its
        weights these [h, G, 1, T], whose sums `add_to` takes.
        """
        if self.weights is not None and len(q) and not self.reading:
            return self.weights
        sums = torch.zeros(len(k), 2, k.shape[1], device=q.device)
        given = self.scale, None, self.softmax[layer]
        for _, rows, weights in weight_tiles(q, k, first, *given):
            one = reduce_group(weights, self.method.gqa_reduce)
            sums[:, 0, rows] += one.sum(1)
            sums[:, 1, rows] += one.square().sum(1)
        return sums

    def add_to(self, scores: torch.Tensor, new: torch.Tensor, decay: float) -> None:
        if new.dim() == 3:
            return super().add_to(scores, new, decay)
        add_moments(scores, new.squeeze(2), self.method.gqa_reduce, self.setup.backend)

    def ranked(self, part: Part, length: int, budget: int) -> torch.Tensor:
        """Means [h, T], infinite for what is kept whatever its mean."""
        assert part.scores is not None
        newest = length - self.method.recent(budget)
        return steady_ranks(part.scores, part.positions, newest, self.steady(length, budget))

    def steady(self, length: int, budget: int) -> Steady:
        """Of budget + 1 tokens the code lets budget - share * budget be chosen from."""
        count = math.floor(self.method.recent_share * budget) + 1
        return Steady(length, min(budget, count))

    def drop(self, rows: Rows, budget: int, sequence: Sequence) -> None:
        length = sequence.length
        newest, by = length - self.method.recent(budget), self.steady(length, budget)
        rows.drop_least(self.setup.backend, keep_from=newest, steady=by)
