"""SnapKV: at the end of a prompt keep what its last queries look at, and those queries' own window;
generated tokens stay.

Source: Li et al., SnapKV (NeurIPS 2024). Score of a token before the window: mean over the window's
queries of softmax(q k), over everything the query sees; reduced over the group (mean), then pooled
along the text. Defaults: window 32, and of the published settings the maximum over 7 neighbours, as
in Ada-KV's experiments (the code's own default is the mean over 5); budget 2048. A later prompt is
cut in the same way, from what is still held and its own tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from engine.bank.base import Step
from engine.base.checks import integer, one_of
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.evict.shared.runtime import EvictingRuntime
from engine.methods.evict.shared.settings import Evicting
from engine.methods.evict.shared.store import Part, Sequence
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import MOST_WINDOW, Needs
from kernels.select.column_sums import column_sums
from kernels.select.drop import RULES, reduce_group


@dataclass(frozen=True)
class SnapKV(Evicting):
    """window: newest queries that choose, and newest tokens that are kept. kernel: neighbours (odd)
    that are pooled by `pool` ("max" | "mean"). gqa_reduce: "mean" | "max" | "sum" over a group,
    before pooling. A budget is at least the window.
    """

    full_prompts = True

    window: int = 32
    kernel: int = 7
    pool: str = "max"
    gqa_reduce: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("window", self.window, 1)
        if self.window > MOST_WINDOW:
            raise SettingError(f"window: found {self.window}, expected at most {MOST_WINDOW}")
        integer("kernel", self.kernel, 1)
        if self.kernel % 2 == 0:
            raise SettingError(f"kernel: found {self.kernel}, expected an odd number")
        one_of("pool", self.pool, ("max", "mean"))
        one_of("gqa_reduce", self.gqa_reduce, RULES)
        if self.tokens is not None and self.tokens < self.window:
            raise SettingError(
                f"tokens: found {self.tokens}, expected at least the window of {self.window} tokens"
            )

    def default_budget(self) -> dict[str, int]:
        return {"tokens": 2048}

    def budget(self, plan: LayerPlan, length: int) -> int:
        """At least the window."""
        return max(self.window, super().budget(plan, length))

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        return replace(super().needs(plan, config, capacity, itemsize), prompt_window=self.window)

    def runtime(self, setup: Setup) -> Runtime:
        return SnapRuntime(self, setup)


class SnapRuntime(EvictingRuntime):
    """One session's stores, cut at every prompt's end."""

    method: SnapKV

    def rank(self, sequence: Sequence, layer: int, part: Part, step: Step | None) -> torch.Tensor:
        assert step is not None, "SnapKV cuts at a prompt's end only"
        window = min(self.method.window, sequence.length)
        q = self.newest_queries(sequence, layer, part.heads, window, step)
        return self.scored(layer, part, q)

    def scored(self, layer: int, part: Part, q: torch.Tensor) -> torch.Tensor:
        """Pooled scores [h, T] of a part by the window's queries q [window, G * h, D]; infinite in
        the window.
        """
        k, window, softmax = part.k, len(q), self.softmax_of(layer, part.heads)
        sums = column_sums(q, k, k.shape[1] - window, self.scale, softmax=softmax)
        scores = reduce_group(sums / window, self.method.gqa_reduce)[:, :-window]
        return functional.pad(self.pooled(scores), (0, window), value=float("inf"))

    def pooled(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores [.., T] pooled along the text."""
        if scores.shape[-1] == 0:
            return scores
        pool = functional.max_pool1d if self.method.pool == "max" else functional.avg_pool1d
        return pool(scores, self.method.kernel, 1, self.method.kernel // 2)
