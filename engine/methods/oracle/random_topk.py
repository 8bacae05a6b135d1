"""Random top-k: every list takes k tokens by chance, anew in every step. The control of the
oracles: what k tokens lose that nobody chose.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.bank.base import Step
from engine.base.checks import integer
from engine.methods.base import Runtime, Setup
from engine.methods.oracle.runtime import GranularRuntime
from engine.methods.oracle.settings import ByGranularity
from engine.methods.random_bits import draw, factors, numbers
from engine.methods.select.base import Buffer
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan


@dataclass(frozen=True)
class RandomTopK(ByGranularity):
    """Settings as ByGranularity's. seed: of the draw, which depends on it, on the step's position,
    on layer and list, and on nothing else: a step that is run again draws the same tokens.
    """

    full_prompts = True

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("seed", self.seed, 0)

    @property
    def name(self) -> str:
        return "random_topk"

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """And a random number of every token."""
        count = capacity if plan.sparse_layers else 0
        given = super().buffers(plan, config, capacity, batch)
        return {**given, "numbers": Buffer((count,), torch.int32)}

    def runtime(self, setup: Setup) -> Runtime:
        return RandomTopKRuntime(self, setup)


class RandomTopKRuntime(GranularRuntime):
    """Lists of one layer have streams of their own: what one draws says nothing of another's."""

    method: RandomTopK
    numbers: torch.Tensor

    def __init__(self, method: RandomTopK, setup: Setup):
        super().__init__(method, setup)
        self.numbers.copy_(numbers(method.seed, len(self.numbers), setup.device))

    def score(self, layer: int, q: torch.Tensor, step: Step, lengths: list[int]) -> None:
        """In place: no temporary grows with the context."""
        lists = len(self.scores) // len(q)
        number = self.plan.number_of(self.group(layer))
        stream = lists * number + torch.arange(lists, device=q.device)
        factor = factors(step.visible[:, None], self.method.seed, stream).flatten()
        longest = max(lengths)
        draw(self.numbers[:longest], factor, self.scores[:, :longest])
