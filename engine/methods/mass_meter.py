"""How much attention the sparse layers keep, measured in every so many steps of an answer, and how
far what they estimate from a sample may be off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import torch

from engine.bank.base import Step
from engine.base.checks import is_integer
from engine.base.errors import SettingError
from engine.methods.base import Runtime
from engine.plan.layers import Role
from kernels.rows.forms import floats, key_floats

DELTA = 0.05  # how often an estimate may be further off than its bound


class MassMeter:
    """A runtime that attends as `inner` does and measures the attention mass each sparse layer
    keeps.

    mass[layer]: share of the softmax over every visible row that falls on the selection and the
    tail, mean over query heads. errors[layer]: of a layer that estimates the rest from a sample,
    `sampling_error`, median over query heads. Costs one more reading of a sparse layer's K per
    step, and then of V of what it reads.

    by_part: the meters of the parts of `inner`, over the same figures. whole, first: of such a
    part, the meter of all and the number of its first layer.
    """

    def __init__(self, inner: Runtime, whole: MassMeter | None = None, first: int = 0):
        self.inner, self._first = inner, first
        self.mass: dict[int, float] = {} if whole is None else whole.mass
        self.errors: dict[int, float] = {} if whole is None else whole.errors
        counts = [part.plan.num_layers for part in inner.by_part]
        self.by_part = tuple(
            MassMeter(part, self, sum(counts[:i])) for i, part in enumerate(inner.by_part)
        )

    @property
    def ahead(self) -> tuple[int, ...]:
        """The inner runtime's."""
        return self.inner.ahead

    def foresee(self, layer: int, q: torch.Tensor, step: Step) -> None:
        """Tell the inner runtime."""
        self.inner.foresee(layer, q, step)

    def carry(self, part: int) -> None:
        """Bring what the inner runtime's parts have chosen."""
        self.inner.carry(part)

    def received(self, step: Step) -> None:
        """Tell the inner runtime."""
        self.inner.received(step)

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attend as the inner runtime; a SPARSE layer leaves its mass behind."""
        out = self.inner.attend(layer, q, step)
        if self.inner.setup.plan.roles[layer] is Role.SPARSE:
            if (share := self.inner.mass_kept(layer, q, step)) is not None:
                self.mass[self._first + layer] = float(share.mean())
                return out
            n, start = step.lengths[0], int(self.inner.tail_start(step)[0])
            weights = self._weights(layer, q, step, n)
            self.mass[self._first + layer] = self.kept(
                self.inner.chosen_rows(layer), weights, start
            )
            drawn = self.inner.drawn_rows(layer)
            if len(drawn) > 1:
                self.errors[self._first + layer] = self._error(layer, step, weights, drawn, start)
        return out

    def attend_local(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attend as the inner runtime in a sliding-window layer, which keeps all it may see."""
        return self.inner.attend_local(layer, q, step)

    def _error(
        self, layer: int, step: Step, weights: torch.Tensor, drawn: torch.Tensor, start: int
    ) -> float:
        chosen = self.inner.chosen_rows(layer)
        tail = torch.arange(start, weights.shape[1], device=chosen.device)
        read = torch.cat([chosen, tail])
        values = floats(step.bank.listed(layer, read)[1][0])
        by_chance, rest = torch.isin(read, drawn), start - len(chosen) + len(drawn)
        errors = sampling_error(weights[:, read], values, by_chance, rest)
        return float(self._of_all_heads(errors).median())

    def _weights(self, layer: int, q: torch.Tensor, step: Step, n: int) -> torch.Tensor:
        """The newest query's attention to n rows, float32 [H, n]."""
        query, scale, logits = q[0, -1].float(), self.inner.scale, []
        softmax = self.inner.softmax[layer]
        for _, k, _ in step.bank.blocks(layer, 0, n, ahead=False):
            heads = key_floats(k[0])
            folded = query.view(heads.shape[0], -1, query.shape[-1])
            logits.append(softmax.capped(torch.matmul(folded, heads.transpose(1, 2)) * scale))
        # of what falls on rows: a sink takes mass from all of them alike
        return torch.softmax(torch.cat(logits, dim=-1), dim=-1).flatten(0, 1)

    def kept(self, chosen: torch.Tensor, weights: torch.Tensor, start: int) -> float:
        """The share of `weights` [H, n] on the rows `chosen` (Runtime.chosen_rows) and from `start`
        on, mean over query heads.
        """
        chosen = chosen.to(weights.device)
        if chosen.dim() == 2:
            # One choice per head: a K/V head's choice holds for its query heads.
            chosen = chosen.repeat_interleave(len(weights) // len(chosen), 0)
            kept = weights.gather(1, chosen.clamp(min=0)).masked_fill(chosen < 0, 0.0).sum(-1)
        else:
            kept = weights[:, chosen].sum(-1)
        return float(self._of_all_heads(kept + weights[:, start:].sum(-1)).mean())

    def _of_all_heads(self, found: torch.Tensor) -> torch.Tensor:
        """A number of each query head [H], those of other ranks' heads included."""
        over_heads = self.inner.setup.over_heads
        return found if over_heads is None else over_heads(found)


def sampling_error(
    weights: torch.Tensor,
    values: torch.Tensor,
    drawn: torch.Tensor,
    rest: int,
    delta: float = DELTA,
) -> torch.Tensor:
    """How far attention that estimates `rest` rows from those that are `drawn` may lie from
    attention to all, as a part of its length: float [H], infinite where the sample says nothing.

    weights [H, n]: of the rows that are read, up to a factor; values [Hkv, n, D]; drawn bool [n].
    Source: Desai et al., vAttention (2025), section 4: a sum of `rest` terms, estimated from m of
    them with the covariance S, is off by z rest sqrt(tr S / m) at most but for delta of all draws
    (central limit), z being the normal quantile of 1 - delta / 2. Attention is a sum of vectors
    over a sum of numbers, each with half of delta: with relative errors e and d of the two it is
    off by (e + d) / (1 - d) at most. Drawn without replacement: times sqrt(1 - m / rest).
    """
    sampled, exact = weights[:, drawn], weights[:, ~drawn]
    kv_heads, m = len(values), sampled.shape[1]
    terms = sampled.view(kv_heads, -1, m, 1) * values[:, None, drawn]
    kept = exact.view(kv_heads, -1, exact.shape[1]) @ values[:, ~drawn]
    z = NormalDist().inv_cdf(1 - delta / 4)
    reach = z * rest * math.sqrt((1 - m / rest) / m)
    total = exact.sum(1) + rest / m * sampled.sum(1)
    below = reach * sampled.var(1).sqrt() / total
    sums = kept + rest / m * terms.sum(2)
    above = reach * (terms.var(2).sum(-1).sqrt() / sums.norm(dim=-1)).flatten()
    return torch.where(below < 1, (above + below) / (1 - below), math.inf)


@dataclass
class Watch:
    """A running estimate of the mass kept: every `every`-th sparse step is metered.

    exact_below: where a metered step keeps less, the steps until the next metered one run full
    attention; None only warns. mass: of the newest metered step, mean over sparse layers.
    """

    every: int = 16
    exact_below: float | None = None
    steps: int = 0
    sampled: int = 0
    exact_steps: int = 0
    mass: float = 1.0
    lowest: float = 1.0

    def __post_init__(self) -> None:
        if not is_integer(self.every) or self.every < 1:
            raise SettingError(f"watch: found every={self.every!r}, expected an int of at least 1")
        if self.exact_below is not None and not 0 < self.exact_below <= 1:
            raise SettingError(
                f"exact_below: found {self.exact_below!r}, expected a number in (0, 1]"
            )

    def meter(self, runtime: Runtime) -> MassMeter:
        """What measures a step of `runtime`."""
        return MassMeter(runtime)

    def due(self) -> bool:
        """Whether this sparse step is to be metered; counts it."""
        self.steps += 1
        return (self.steps - 1) % self.every == 0

    def ran_exact(self) -> None:
        """Count a step that ran full attention because the sample before kept too little."""
        self.exact_steps += 1

    def saw(self, mass: dict[int, float]) -> None:
        """Note what a metered step kept: {layer: share}."""
        self.mass = sum(mass.values()) / max(1, len(mass))
        self.lowest = min(self.lowest, self.mass)
        self.sampled += 1

    @property
    def exact(self) -> bool:
        """Whether the steps up to the next sample run full attention."""
        return self.exact_below is not None and self.mass < self.exact_below
