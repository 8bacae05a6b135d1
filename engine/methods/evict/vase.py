"""VaSE: values of a large range stay, and the rest is drawn in proportion to the attention of the
newest queries.

Source: Chang et al., VaSE (arXiv 2606.03928, 2026), by its abstract and its code; its variant
AttnV. Before the window of the newest 64 tokens a cut keeps a quarter of the budget by the largest
range (maximum less minimum) of their values, the first 4 tokens among them, and draws the others
without replacement in proportion to their score: softmax over the tokens before the window, mean
over the window's queries, mean over 5 neighbours, mean over a group. Defaults: the code's 64 and a
quarter of a budget of 4,096.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.bank.base import Step
from engine.base.checks import boolean, fraction, integer
from engine.methods.base import Runtime, Setup
from engine.methods.evict.random_eviction import draws
from engine.methods.evict.rkv import candidate_weights, require_window
from engine.methods.evict.shared.periodic import Periodic, PeriodicRuntime
from engine.methods.evict.shared.store import Part, Sequence, best
from engine.methods.evict.snapkv import SnapKV, SnapRuntime
from kernels.rows.forms import floats
from kernels.select.drop import reduce_group

PROTECTED = 1e30  # below the window's infinity, above every draw


@dataclass(frozen=True)
class VaSE(SnapKV, Periodic):
    """protect: share of the budget that large values take. sink: first tokens among those. noise:
    whether the rest is drawn; else the largest scores stay. seed: of the draws, which depend only
    on it and on (layer, head, position, length at the cut). every: at least the window.
    """

    full_prompts = True

    window: int = 64
    kernel: int = 5
    pool: str = "mean"
    every: int = 64
    protect: float = 0.25
    sink: int = 4
    noise: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction("protect", self.protect, zero=True)
        integer("sink", self.sink, 0)
        boolean("noise", self.noise)
        integer("seed", self.seed, 0)
        require_window(self.every, self.window)

    def default_budget(self) -> dict[str, int]:
        return {"tokens": 4096}

    def runtime(self, setup: Setup) -> Runtime:
        return VaSERuntime(self, setup)


class VaSERuntime(SnapRuntime, PeriodicRuntime):
    """One session's stores, cut at every prompt's end and every so many tokens of an answer."""

    method: VaSE

    def rank(self, sequence: Sequence, layer: int, part: Part, step: Step | None) -> torch.Tensor:
        """Draws in the order in which they come, infinite in the window."""
        assert step is not None, "VaSE cuts by its newest queries"
        method, window = self.method, min(self.method.window, sequence.length)
        q = self.newest_queries(sequence, layer, part.heads, window, step)
        given = self.scale, self.softmax[layer].cap
        weights = self.pooled(candidate_weights(q, part.k, *given))
        scores = reduce_group(weights, method.gqa_reduce)
        # the largest of log(score) + Gumbel are a draw without replacement
        scores = functional.pad(scores.log(), (0, window), value=float("inf"))
        if method.noise:
            scores = scores + draws(method.seed, self.plan.first + layer, part, sequence.length)
        budget = sequence.budgets[layer]
        count = min(math.floor(method.protect * budget), budget - window, len(scores[0]) - window)
        if count <= 0:
            return scores
        v = floats(part.v)
        ranges = v.amax(-1) - v.amin(-1)
        ranges = ranges.masked_fill(part.positions < method.sink, float("inf"))
        large = best(ranges[:, :-window], part.positions[:, :-window], count)
        return scores.scatter(1, large, PROTECTED)
