"""OmniKV whose k is what a step needs: the fewest tokens that hold a part of the attention.

Source: the OmniKV paper (ICLR 2025), section 4, whose ranking this keeps; the rule is Twilight's
(Lin et al., 2025), top-p for attention. The tokens before the tail are taken in the order of
OmniKV's scores until their sum is `mass` of the sum of all, so many at least as `least` says and at
most the budget, which is what the plan counts. With mass 1.0 it is OmniKV.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.bank.base import Step
from engine.base.checks import fraction, integer
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.omnikv.method import OmniKV
from engine.methods.omnikv.runtime import OmniKVRuntime
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from kernels.select.topk import select_topk


@dataclass(frozen=True)
class OmniKVTopP(OmniKV):
    """Settings as OmniKV's; the budget is the most that a step reads. mass: part of the scores' sum
    that the chosen tokens hold, above 0 and at most 1; least: tokens that are chosen whatever they
    hold.
    """

    full_prompts = True

    mass: float = 0.9
    least: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction("mass", self.mass)
        integer("least", self.least, 1)
        if self.tokens is not None and self.least > self.tokens:
            raise SettingError(
                f"least: found {self.least}, expected at most the budget of {self.tokens} tokens"
            )
        if self.official or self.prefill_ratio is not None or self.sink or self.kind == "raw":
            raise SettingError(
                "omnikv_top_p: official, prefill_ratio, sink and raw scores do not go with a part "
                "of the attention; leave them out"
            )

    @property
    def name(self) -> str:
        return "omnikv_top_p"

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """OmniKV's, and the position of every token, 4 B."""
        needs = super().needs(plan, config, capacity, itemsize)
        more = 4 * capacity if needs.selected else 0
        return replace(needs, device_bytes=needs.device_bytes + more)

    def runtime(self, setup: Setup) -> Runtime:
        return TopPRuntime(self, setup)


class TopPRuntime(OmniKVRuntime):
    """Buffer: positions int32 [capacity]. Nothing visits the host: k is a tensor."""

    method: OmniKVTopP

    def __init__(self, method: OmniKVTopP, setup: Setup):
        super().__init__(method, setup)
        count = self.scores.shape[1]
        self.positions = torch.arange(count, dtype=torch.int32, device=setup.device)

    @property
    def nbytes(self) -> int:
        return super().nbytes + 4 * self.positions.numel()

    def choose(self, group: int, scores: torch.Tensor, step: Step, counted: bool = False) -> None:
        """Select as many of the group's tokens as hold `mass` of `scores` [B, bucket] before the
        tail.
        """
        stop = step.tail_start(self.method.tail)
        k = self.k_device
        if self.method.mass < 1:
            scores.masked_fill_(self.positions[: scores.shape[1]] >= stop[:, None], 0.0)
            most = min(self.index[group].shape[2], scores.shape[1])
            sums = scores.topk(most, 1).values.cumsum(1)
            wanted = self.method.mass * scores.sum(1, keepdim=True)
            needed = (sums < wanted).sum(1).int() + 1
            k = torch.minimum(needed.clamp_(min=self.method.least), k)
        select_topk(
            scores,
            self.zero,
            stop,
            k,
            self.index[group][:, 0],
            self.counts[group],
            scratch=self.setup.scratch,
            backend=self.setup.backend,
            counted=counted,
        )
