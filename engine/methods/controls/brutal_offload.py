"""Brutal offload: exact attention with the last layers' K and V in host memory; every step copies
all of them back.

Source: the OmniKV paper's ablation without the context selector: the last 20 of 32 layers, each
copied while the layer four before it runs. The baseline that shows what selection saves. The newest
tokens stay on the device. Over a bank that is on the device it is full attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.bank.base import Step
from engine.base.checks import integer
from engine.methods.base import Method, Runtime, Setup
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs


@dataclass(frozen=True)
class BrutalOffload(Method):
    """layers: how many of the last layers live in host memory (all, where a model has fewer).
    ahead: layers between the start of a copy and its use; ahead + 1 whole layers are staged on the
    device.
    """

    full_prompts = True

    layers: int = 20
    ahead: int = 4

    def __post_init__(self) -> None:
        for name in ("layers", "ahead"):
            integer(name, getattr(self, name), 1)

    @property
    def name(self) -> str:
        return "brutal_offload"

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        # no graph over an offloaded bank: how much is copied depends on the length, which the host
        # knows
        last = plan.all.seeing_layers[-self.layers :]
        return Needs(
            offload=tuple((layer,) for layer in plan.here(last)),
            staged_layers=self.ahead + 1,
            cuda_graph=True,
            sliding=True,
            capped=True,
            recurrent=True,
            latent=True,
        )

    def runtime(self, setup: Setup) -> BrutalRuntime:
        return BrutalRuntime(self, setup)


class BrutalRuntime(Runtime):
    """Full attention that starts copies ahead of itself."""

    method: BrutalOffload

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Start the copy of the layer `ahead` further on (at the first layer, of all up to it),
        then attend to everything.
        """
        seeing, ahead = self.plan.seeing_layers, self.method.ahead
        at = seeing.index(layer)
        for coming in seeing[at + ahead if at else 0 : at + ahead + 1]:
            step.bank.stage_layer(coming)
        return self.attend_dense(layer, q, step)
