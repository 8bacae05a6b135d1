"""Expected Attention: at the end of a prompt keep what queries to come are expected to look at.

Source: Devoto et al., Expected Attention (2025), by its abstract and the code of kvpress. The
prompt's queries, before rotation, have a mean m and a covariance S per query head. Turned by the
mean rotation of the next 512 positions, a Gaussian of these gives a key the expected weight
exp(k m / sqrt(d) + k S k / (2 d)). Softmax over the tokens, mean over a group, times the norm of
the value. The first 4 tokens stay and count for no statistic. Generated tokens stay. kvpress'
default drops nothing; a share of 0.5 is one of its examples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.bank.base import Step
from engine.base.checks import boolean, integer
from engine.methods.base import Runtime, Setup
from engine.methods.evict.shared.runtime import EvictingRuntime
from engine.methods.evict.shared.settings import Evicting
from engine.methods.evict.shared.store import Part, Sequence
from engine.methods.evict.shared.windows import spread
from engine.model.config.config import ModelConfig
from engine.model.rope import Rotary, apply_rope
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from kernels.rows.forms import floats, key_floats


@dataclass(frozen=True)
class ExpectedAttention(Evicting):
    """future: positions to come whose mean rotation counts. sink: first tokens that stay.
    covariance: whether queries spread; else they are their mean. values: whether the norm of a
    value counts.
    """

    full_prompts = True

    future: int = 512
    sink: int = 4
    covariance: bool = True
    values: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("future", self.future, 1)
        integer("sink", self.sink, 0)
        boolean("covariance", self.covariance)
        boolean("values", self.values)

    @property
    def name(self) -> str:
        return "expected_attention"

    def default_budget(self) -> dict[str, Any]:
        return {"share": 0.5}

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        needs = super().needs(plan, config, capacity, itemsize)
        # a Gaussian's expected weights have no closed form under a cap
        return replace(needs, every_query=True, capped=False)

    def store_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int
    ) -> int:
        """The store, and twice the statistics of a prompt."""
        statistics = config.num_heads * _width(config.head_dim) * 4
        store = super().store_bytes(plan, config, itemsize, capacity)
        return store + 2 * len(plan.partial_layers) * statistics

    def runtime(self, setup: Setup) -> Runtime:
        return ExpectedRuntime(self, setup)


def _width(dim: int) -> int:
    """Floats of a query head's statistics: how many queries, their sum, the sum of their
    products.
    """
    return 1 + dim + dim * dim


class ExpectedRuntime(EvictingRuntime):
    """One session's stores. While a prompt is read `Sequence.sums` holds its queries' statistics,
    [Hkv, G, 1 + D + D * D] float32 per layer.
    """

    method: ExpectedAttention

    def __init__(self, method: ExpectedAttention, setup: Setup):
        super().__init__(method, setup)
        self.rotary = Rotary(setup.config, setup.device)
        self.stop = 0  # where the call that reads ends

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        """A prompt begins with no query; a later part of it goes on."""
        sequence, goes_on = self.sequences[0], self.reading
        super().begin_prompt(start, stop, more)
        self.stop = stop
        if sequence.sums is None or not goes_on:
            config = self.setup.config
            shape = self.heads, config.group, _width(config.head_dim)
            sums = [torch.zeros(shape, device=self.setup.device) for _ in self.evicting]
            sequence.keep_sums(spread(self.plan, sums, sums[0].new_zeros(0)))

    def observe(
        self,
        b: int,
        layer: int,
        number: int,
        q: torch.Tensor,
        k: torch.Tensor,
        first: int,
        start: int,
    ) -> None:
        """Leave a chunk's statistics pending, once: its last query comes again for its output."""
        if not self.reading or (layer, number) in self.pending:
            return
        idle = min(len(q), max(0, self.method.sink - start))
        at = torch.arange(start + idle, start + len(q), device=q.device)
        cos, sin = self.rotary.at(at, self.stop, layer)
        size = cos.square() + sin.square()  # 1, or the square of the rope's attention factor
        q = apply_rope(q[idle:].float(), cos / size, -sin / size)
        q = q.unflatten(1, (len(k), self.setup.config.group)).permute(1, 2, 0, 3)
        products = torch.matmul(q.transpose(-1, -2), q)
        count = torch.full((*q.shape[:2], 1), float(q.shape[2]), device=q.device)
        self.pending[layer, number] = torch.cat([count, q.sum(2), products.flatten(2)], -1)

    def add_scores(self, b: int, sequence: Sequence, count: int) -> None:
        if not self.reading or sequence.sums is None:
            return
        for layer in self.evicting:
            parts = [new for (at, _), new in sorted(self.pending.items()) if at == layer]
            sequence.sums[layer] += torch.cat(parts)

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        """Of tokens that nobody has read (a synthetic bank) no query is known."""
        if step is not None and not self.reading:
            self.begin_prompt(self.sequences[0].length, length)
        super().end_prompt(length, step)

    def rank(self, sequence: Sequence, layer: int, part: Part, step: Step | None) -> torch.Tensor:
        """Expected weights, infinite for the first tokens."""
        assert sequence.sums is not None
        mean, spread = self._turned(sequence.sums[layer][part.heads], sequence.length, layer)
        k = key_floats(part.k)
        logits = torch.matmul(mean, k.transpose(1, 2)) * self.scale
        if self.method.covariance:
            for group in range(mean.shape[1]):
                of_keys = torch.matmul(k, spread[:, group])
                logits[:, group] += (of_keys * k).sum(-1) * (self.scale**2 / 2)
        first = (part.positions < self.method.sink).unsqueeze(1)
        scores = logits.masked_fill(first, float("-inf")).softmax(-1).mean(1)
        if self.method.values:
            scores = scores * floats(part.v).norm(dim=-1)
        return scores.masked_fill(first[:, 0], float("inf"))

    def _turned(
        self, sums: torch.Tensor, length: int, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean [h, G, D] and covariance [h, G, D, D] of queries at the positions from `length`
        on.
        """
        dim = self.setup.config.head_dim
        count = sums[..., :1].clamp(min=1)
        mean, square = sums[..., 1 : 1 + dim] / count, sums[..., 1 + dim :] / count
        spread = square.unflatten(-1, (dim, dim)) - mean.unsqueeze(-1) * mean.unsqueeze(-2)
        at = torch.arange(length, length + self.method.future, device=sums.device)
        cos, sin = (t.mean(0, keepdim=True) for t in self.rotary.at(at, layer=layer))
        heads = mean.shape[:2]
        mean = apply_rope(mean.flatten(0, 1).unsqueeze(0), cos, sin)[0].unflatten(0, heads)
        flat = spread.flatten(0, 2).unsqueeze(0)
        flat = apply_rope(flat, cos, sin)[0].unflatten(0, (-1, dim)).transpose(1, 2)
        flat = apply_rope(flat.flatten(0, 1).unsqueeze(0), cos, sin)[0]
        return mean, flat.unflatten(0, (*heads, dim))
