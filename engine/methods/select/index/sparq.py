"""SparQ: the logits of all tokens from the few channels in which the query is largest; the tokens
that lead are attended to exactly, and what the others would weigh goes to the mean of all V.

Source: Ribar et al., SparQ Attention, ICML 2024, Algorithm 1 and its section on grouped queries,
and graphcore-research/llm-inference-research (ann_attention.py). Published: r 32 of 128 channels
(16 to 64 tried), k 128, of which the newest quarter is taken whatever its scores, every layer. Over
a group |q| is summed to choose channels, and the logits to choose tokens; alpha stays each query
head's own. Prompts are read densely. K is held twice, the second time by channel, so that a channel
is read in one run: that copy is on the device, also where the layer's rows lie in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import repeat
from typing import Any

import torch

from engine.bank.base import Step
from engine.base.checks import integer, one_of
from engine.methods.base import Runtime, Setup
from engine.methods.select.base import Buffer, Selection
from engine.methods.select.index.base import (
    REDUCTIONS,
    Indexed,
    IndexRuntime,
    within_head_dim,
)
from engine.methods.select.index.value_sums import ValueSums
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from kernels.index.choose import choose_by_channels
from kernels.index.indexes import Channels, Ends
from kernels.index.learn import Learnt, learn_channels, told_channels
from kernels.index.step import Now

NEWEST = 4  # the newest tokens are this part of the budget


@dataclass(frozen=True)
class SparQ(Indexed):
    """Budget as Budgeted's; a quarter of it are the newest tokens. r: channels of which approximate
    logits are made, None for a quarter of them. mean: the approximate weight of the tokens that are
    not read goes to the mean V. dense_layers, gqa_reduce: as Indexed's.
    """

    full_prompts = True

    r: int | None = None
    mean: bool = True
    dense_layers: int = 0
    gqa_reduce: str = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.r is not None:
            integer("r", self.r, 1)
        one_of("gqa_reduce", self.gqa_reduce, REDUCTIONS[:-1])

    def channels(self, config: ModelConfig) -> int:
        """r, or a quarter of the head dimension."""
        return max(1, config.head_dim // 4) if self.r is None else self.r

    def newest(self, budget: int) -> int:
        return budget // NEWEST

    def plan(self, config: ModelConfig) -> LayerPlan:
        """Raises SettingError where r is above the model's head dimension."""
        within_head_dim("r", self.channels(config), config)
        return super().plan(config)

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """K by channel, sums of V (1/16 of V in bfloat16), and a query head's logits."""
        layers, heads, dim = len(plan.sparse_layers), config.num_kv_heads, config.head_dim
        rows = capacity if layers else 0
        found = super().buffers(plan, config, capacity, batch) | {
            "by_channel": Buffer((layers, batch, heads, dim, capacity)),
            "logits": Buffer((batch * config.num_heads, rows), torch.float32),
        }
        if self.mean:
            prefix, blocks = ValueSums.buffers(layers, batch, heads, capacity, dim)
            found |= {"prefix": prefix, "blocks": blocks}
            found["weights"] = Buffer((layers, batch, config.num_heads), torch.float32)
            found["means"] = Buffer((layers, batch, heads, dim), torch.float32)
        return found

    def runtime(self, setup: Setup) -> Runtime:
        return SparQRuntime(self, setup)


@dataclass(frozen=True)
class Completed(Selection):
    """A choice, what it weighs of all attention, by estimate, and what stands for the rest.

    weight [B, H], mean [B, Hkv, D] float32.
    """

    weight: torch.Tensor = field(kw_only=True)
    mean: torch.Tensor = field(kw_only=True)


class SparQRuntime(IndexRuntime):
    """No CUDA graph: the host knows which rows are new."""

    method: SparQ
    by_channel: torch.Tensor
    logits: torch.Tensor
    weights: torch.Tensor
    means: torch.Tensor
    prefix: torch.Tensor
    blocks: torch.Tensor

    def __init__(self, method: SparQ, setup: Setup):
        super().__init__(method, setup)
        self._sums = None
        if method.mean:
            self._sums = ValueSums(self.prefix, self.blocks, self.means, setup.backend)

    @cached_property
    def _by(self) -> list[Channels]:
        """What each group chooses by."""
        method, setup = self.method, self.setup
        settings = method.gqa_reduce, self.scale, self.logits.view(setup.batch, -1, setup.capacity)
        r, weights = method.channels(setup.config), self.weights if method.mean else repeat(None)
        return [
            Channels(self.scores, chosen, *settings, rows=rows, r=r, weights=weight)
            for chosen, rows, weight in zip(self.index, self.by_channel, weights)
        ]

    def begins(self, group: int, b: int, first: int) -> int:
        return first if self._sums is None else self._sums.begins(group, b, first)

    def absorb(self, group: int, b: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        learn_channels(self.by_channel[group, b], first, k, backend=self.setup.backend)
        if self._sums is not None:
            self._sums.add(group, b, first, v)

    def rank(self, group: int, q: torch.Tensor, lengths: list[int], ends: Ends) -> None:
        """Leaves what the choices weigh in self.weights."""
        newest = self.method.newest(self.k)
        choose_by_channels(self._by[group], q, lengths, ends, newest, self.setup.backend)

    def by(self, group: int) -> Channels:
        return self._by[group]

    def told(self, n: int, tail: int, stop: torch.Tensor, room: torch.Tensor) -> Now:
        return Now(n, n, tail, stop, room, self.method.newest(self.k))

    def absorbed(self, group: int, k: torch.Tensor, v: torch.Tensor) -> list[tuple[str, Learnt]]:
        found = [("channels", told_channels(self.by_channel[group, 0], k))]
        if self._sums is None:
            return found
        return [*found, ("value", self._sums.told(group, 0, v))]

    def mean(self, group: int) -> torch.Tensor | None:
        return None if self._sums is None else self.means[group, 0]

    def noted(self, group: int, n: int, told: bool) -> None:
        if self._sums is not None and told:
            self._sums.note(group, 0, n)
        elif self._sums is not None:
            self._sums.mean_of(group, 0, n)

    def completed(self, group: int, chosen: Selection, lengths: list[int]) -> Selection:
        if self._sums is None:
            return chosen
        for b, n in enumerate(lengths):
            self._sums.mean_of(group, b, n)
        return Completed(
            chosen.index,
            chosen.counts,
            chosen.tail_start,
            weight=self.weights[group],
            mean=self.means[group],
        )

    def attend_selection(
        self, layer: int, q: torch.Tensor, step: Step, chosen: Selection
    ) -> torch.Tensor:
        """With the mean V in place of what is not read."""
        out = super().attend_selection(layer, q, step, chosen)
        if not isinstance(chosen, Completed):
            return out
        batch, heads, dim = chosen.mean.shape
        wide = out.view(batch, -1, heads, q.shape[2] // heads, dim).float()
        weight = chosen.weight.view(batch, 1, heads, -1, 1)
        found = torch.lerp(chosen.mean.view(batch, 1, heads, 1, dim), wide, weight)
        return found.view(out.shape).to(out.dtype)

    def choice(self) -> Any:
        return {
            group: replace(chosen, weight=chosen.weight.clone(), mean=chosen.mean.clone())
            if isinstance(chosen, Completed)
            else chosen
            for group, chosen in super().choice().items()
        }

    def index_bytes(self, n: int) -> int:
        """r channels of every token, and the mean."""
        heads, dim = self.by_channel.shape[2:4]
        found = heads * self.method.channels(self.setup.config) * n * self.by_channel.element_size()
        return found + (2 * heads * dim * self.prefix.element_size() if self.method.mean else 0)
