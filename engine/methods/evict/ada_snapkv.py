"""Ada-SnapKV: SnapKV with a layer budget that is divided among the heads by where the layer's
highest scores lie.

Source: Feng et al., Ada-KV (2024), Algorithms 2 and 3, Theorems 2-4. Outside the window a layer
keeps h (B - W) tokens in all: B*_i of them are head i's share of the layer-wide highest scores, and
head i gets alpha B*_i + (1 - alpha) (B - W), rounded so that the sum is exact. alpha is the weight
of the adaptive part (the code's floor_alpha is that of the uniform part); 0.5 in both. Heads then
hold different numbers of tokens: each has its own Rows, in one run of a layer
(engine/methods/evict/shared/ragged.py), so that bytes are those of the tokens. With alpha 0 it is
SnapKV.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.bank.base import Step
from engine.base.checks import fraction
from engine.methods.base import Runtime, Setup
from engine.methods.evict.pyramidkv import PyramidKV
from engine.methods.evict.shared.ragged import table_bytes
from engine.methods.evict.shared.store import Part, Sequence, best, rounded
from engine.methods.evict.snapkv import SnapKV, SnapRuntime
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan


@dataclass(frozen=True)
class AdaSnapKV(SnapKV):
    """alpha: weight of the adaptive budgets, in [0, 1]."""

    full_prompts = True
    ragged = True

    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction("alpha", self.alpha, zero=True)

    @property
    def name(self) -> str:
        return "ada_snapkv"

    def held_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, prompt: int, generated: int = 0
    ) -> int:
        """With the tables of where heads lie."""
        rows = super().held_bytes(plan, config, itemsize, prompt, generated)
        return rows + table_bytes(plan, config)

    def store_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int
    ) -> int:
        """With the tables of where heads lie."""
        return super().store_bytes(plan, config, itemsize, capacity) + table_bytes(plan, config)

    def runtime(self, setup: Setup) -> Runtime:
        return AdaRuntime(self, setup)


class AdaRuntime(SnapRuntime):
    """One session's stores, with a number of tokens per K/V head."""

    method: AdaSnapKV

    def choose(
        self, sequence: Sequence, layer: int, parts: list[Part], step: Step | None
    ) -> list[tuple[Part, torch.Tensor]]:
        """Each head's window and its highest scores, as many as `deal` gives it."""
        window, found = min(self.method.window, sequence.length), []
        for part in parts:
            scores = self.rank(sequence, layer, part, step)
            found += [(part.head(i), scores[i : i + 1]) for i in range(len(scores))]
        counts = deal(
            [scores[0, :-window] for _, scores in found],
            sequence.budgets[layer] - window,
            self.method.alpha,
        )
        return [
            (part, best(scores, part.positions, count + window))
            for (part, scores), count in zip(found, counts)
        ]


def deal(scores: list[torch.Tensor], budget: int, alpha: float) -> list[int]:
    """Budgets of h heads from their scores [T_i]; the sum is h * budget, or all there is. Ada-KV,
    Algorithm 2.
    """
    lengths = [len(s) for s in scores]
    total = min(len(scores) * budget, sum(lengths))
    if total == sum(lengths):
        return lengths
    owner = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
    ranked = torch.sort(torch.cat([s.cpu() for s in scores]), descending=True, stable=True)
    most = torch.bincount(owner[ranked.indices[:total]], minlength=len(scores)).tolist()
    wanted = [
        min(n, alpha * own + (1 - alpha) * total / len(scores)) for n, own in zip(lengths, most)
    ]
    return rounded(wanted, total, lengths)


@dataclass(frozen=True)
class AdaPyramid(AdaSnapKV, PyramidKV):
    """alpha as AdaSnapKV's, beta as PyramidKV's."""

    full_prompts = True

    @property
    def name(self) -> str:
        return "ada_pyramid"
