"""A prompt's heavy hitters by their column sums, and how much of every later step's attention lies
outside them.

Source: the OmniKV paper, Figure 1c: the quarter of the prompt's tokens that received most attention
while it was read; what a step gives to the others shows that tokens dropped then are wanted later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine import Full
from engine.bank.base import Bank, Step
from engine.methods.base import Runtime, Setup
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from kernels.select.column_sums import column_sums
from tools.calibrate.similarity import softmax_rows

QUARTER = 0.25


@dataclass(frozen=True)
class Summed(Full):
    """Full attention whose prompts leave their column sums."""

    named = False

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        return replace(super().needs(plan, config, capacity, itemsize), every_query=True)

    def runtime(self, setup: Setup) -> Runtime:
        return SummedRuntime(self, setup)


class SummedRuntime(Runtime):
    """sums: per layer, float64 [tokens read]: what every token has received, summed over the
    queries and heads so far.
    """

    def __init__(self, method: Summed, setup: Setup):
        super().__init__(method, setup)
        self.sums = [torch.zeros(0, dtype=torch.float64)] * setup.config.num_layers

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        stop = start + q.shape[1]
        if stop <= len(self.sums[layer]):  # the last layer, once more for the newest token
            return super().attend_prompt(layer, q, bank, start)
        k = torch.cat([k[0] for _, k, _ in bank.blocks(layer, 0, stop)], dim=1)
        found = column_sums(q[0], k, start, self.scale, softmax=self.softmax[layer]).sum((0, 1))
        found = found.double().cpu()
        found[:start] += self.sums[layer][:start]
        self.sums[layer] = found
        return super().attend_prompt(layer, q, bank, start)


class HeavyMeter:
    """Full attention that notes, of each step's attention to the prompt, the share outside a
    quarter of it: the heavy hitters, a quarter by chance, and the step's own best quarter.

    outside: [steps][layers] (heavy, chance, best), means over heads.
    """

    def __init__(self, inner: SummedRuntime, seed: int = 0):
        self.inner = inner
        self.outside: list[list[tuple[float, float, float]]] = []
        self._random = torch.Generator().manual_seed(seed)

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Full attention of one layer; first notes what lies outside."""
        if layer == 0:
            self.outside.append([])
        sums = self.inner.sums[layer]
        keep = max(1, int(QUARTER * len(sums)))
        n = int(step.visible[0])
        weights = softmax_rows(q[0, -1], step.bank, layer, n, self.inner.scale).double().cpu()
        weights = weights[:, : len(sums)]
        weights = weights / weights.sum(-1, keepdim=True)
        chance = torch.randperm(len(sums), generator=self._random)[:keep]
        sets = sums.topk(keep).indices, chance, weights.sum(0).topk(keep).indices
        heavy, by_chance, best = (1 - float(weights[:, rows].sum(-1).mean()) for rows in sets)
        self.outside[-1].append((heavy, by_chance, best))
        return self.inner.attend(layer, q, step)

    def attend_local(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """No layer has a window (tools.common.arguments.require_plain)."""
        raise AssertionError(f"layer {layer} has a window")
