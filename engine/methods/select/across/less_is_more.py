"""LessIsMore: in a few layers every query head names its best tokens, and one list of what they
name serves all heads of the layers behind.

Source: LessIsMore (Yang et al., 2025, arXiv 2508.07101), section 4, and its form in microsoft/
kascade (LessIsMoreStrategy). Of a budget of k tokens a quarter are the newest, the first `sinks`
tokens among that quarter; for the rest every head of a choosing layer ranks the tokens between by
its logits. The heads' first places come first, then their second ones, and so on, each token once,
in the order of the heads, until the list is full. Choosing layers attend to everything, and so do
those below the first. Differs: choosing layers are by default those of TidalDecode, which the paper
builds on, and k is of the tokens at the end of the latest prompt.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.bank.base import Step
from engine.base.checks import fraction, integer
from engine.methods.base import Runtime, Setup
from engine.methods.select.across.by_logits import (
    ByLogits,
    bring_received,
    brought,
    checked_layers,
    choice_buffers,
    choosers_stay,
    choosing_layers,
    require_room,
)
from engine.methods.select.base import Budgeted, Buffer, Selection
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan, layer_plan
from engine.plan.needs import Needs
from kernels.select.turns import name_in_turns


@dataclass(frozen=True)
class LessIsMore(Budgeted):
    """Budget as Budgeted's, sinks and newest tokens included. layers: ascending numbers of the
    layers that choose, None for 2 and 13 of 32 at the model's depth. recent: the newest tokens'
    share of the budget; sinks: first tokens among these, none where they would be more.
    """

    full_prompts = True

    layers: tuple[int, ...] | None = None
    recent: float = 0.25
    sinks: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layers is not None:
            object.__setattr__(self, "layers", checked_layers("layers", self.layers))
        fraction("recent", self.recent, zero=True)
        integer("sinks", self.sinks, 0)

    @property
    def name(self) -> str:
        return "less_is_more"

    def parts(self, k: int) -> tuple[int, int, int]:
        """(first tokens, chosen ones, newest ones) of a budget of k."""
        chosen = math.floor(k * (1 - self.recent))
        newest = k - chosen
        sinks = self.sinks if newest >= self.sinks else 0
        return sinks, chosen, newest - sinks

    def plan(self, config: ModelConfig) -> LayerPlan:
        """FULL below the first choice, FILTER where one is made, SPARSE elsewhere."""
        require_room(self, config)
        layers = choosing_layers("layers", self.layers, config)
        return layer_plan(
            config.num_layers, layers, 0, config.local_layers, config.recurrent_layers
        )

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """The place of every token in the heads' order, and each choosing layer's list."""
        return choice_buffers(self, plan, capacity, batch)

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """The layers that choose read everything, and stay on the device."""
        needs = super().needs(plan, config, capacity, itemsize)
        return choosers_stay(needs, plan, 1, together=True)

    def runtime(self, setup: Setup) -> Runtime:
        return LessIsMoreRuntime(self, setup)


class LessIsMoreRuntime(ByLogits):
    """One list for all heads of a group's layers, and the newest tokens."""

    method: LessIsMore

    def select(self, layer: int, q: torch.Tensor, step: Step) -> Selection:
        group, lengths = self.plan.group_of[layer], step.lengths
        if max(lengths) <= self.k:
            return Selection(None, None, step.visible)
        assert group is not None
        (sinks, chosen, newest), index = self.method.parts(self.k), self.index[group]
        tail = self.tail_start(step)
        counts = torch.empty_like(tail)
        for b, n in enumerate(lengths):
            stop = max(0, n - newest)
            logits = self.logs(layer, q, step, b, n).logits
            given = min(sinks, stop), stop, chosen, self.scores[b], index[b]
            counts[b] = name_in_turns(logits, *given, self.setup.backend)
        found = Selection(index.unsqueeze(1), counts, tail)
        return brought(found, self.plan.groups[group].layers, step)

    def received(self, step: Step) -> None:
        bring_received(self.chosen, self.plan.groups, step)

    def tail_start(self, step: Step) -> torch.Tensor:
        """The newest tokens are read beside the list."""
        return (step.visible - self.method.parts(self.k)[2]).clamp(min=0)
