"""Oracle top-k: every layer reads the k tokens to which its own attention gives most. No choice of
k tokens keeps more of it.

Source: none of its own; the bound beside which a choice is measured, here for one list of a layer,
of a K/V head and of a query head. It reads every K to choose, so that it saves nothing: it says
what a choice loses, apart from what any k tokens lose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch

from engine.bank.base import Bank, Step
from engine.bank.brought import Brought
from engine.methods.base import Runtime, Setup
from engine.methods.oracle.runtime import GranularRuntime
from engine.methods.oracle.settings import ByGranularity
from engine.methods.oracle.true_attention import shared_mass, true_attention
from engine.methods.select.base import Buffer
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan, Role


@dataclass(frozen=True)
class OracleTopK(ByGranularity):
    """Settings as ByGranularity's. A list takes the k tokens with the largest sum, over its query
    heads, of the softmax of the newest query's logits over all tokens.
    """

    full_prompts = True

    @property
    def name(self) -> str:
        return "oracle_topk"

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """And the weights of one sequence in one layer."""
        floats = config.num_heads * capacity if plan.sparse_layers else 0
        given = super().buffers(plan, config, capacity, batch)
        return {**given, "weights": Buffer((floats,), torch.float32)}

    def runtime(self, setup: Setup) -> Runtime:
        return OracleRuntime(self, setup)


class OracleRuntime(GranularRuntime):
    """A layer in host memory comes over whole, once a step: it is scored and chosen from there."""

    weights: torch.Tensor

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        if self.plan.roles[layer] is Role.SPARSE and step.bank.on_host(layer):
            brought = Brought(*step.bank.kv(layer, step.bucket))
            step = replace(step, bank=cast(Bank, brought))
        return super().attend(layer, q, step)

    def score(self, layer: int, q: torch.Tensor, step: Step, lengths: list[int]) -> None:
        k = step.bank.kv(layer, step.bucket)[0]
        setup, lists = self.setup, len(self.scores) // len(q)
        given = self.scale, self.softmax[layer], self.weights, setup.backend, setup.scratch.part
        for b, n in enumerate(lengths):
            weights = true_attention(q[b, -1], k[b, :, :n], *given)
            own = self.scores[b * lists : (b + 1) * lists, :n]
            shared_mass(weights, lists, own)

    def choosing_bytes(self, n: int) -> int:
        """K of every token, where any is left out: a choice of all needs none."""
        config = self.setup.config
        row = config.kv_bytes(self.setup.dtype.itemsize) // config.sides
        return len(self.plan.sparse_layers) * n * row if self.chooses(n) else 0
