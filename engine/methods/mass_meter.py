"""How much attention the sparse layers keep, measured in every so many steps of an answer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.bank.base import Step
from engine.base.checks import is_integer
from engine.base.errors import SettingError
from engine.methods.base import Runtime
from engine.plan.layers import Role
from kernels.rows.forms import key_floats


class MassMeter:
    """A runtime that attends as `inner` does and measures the attention mass each sparse layer
    keeps.

    mass[layer]: share of the softmax over every visible row that falls on the selection and the
    tail, mean over query heads. Costs one more reading of a sparse layer's K per step.
    """

    def __init__(self, inner: Runtime):
        self.inner = inner
        self.mass: dict[int, float] = {}

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attend as the inner runtime; a SPARSE layer leaves its mass behind."""
        out = self.inner.attend(layer, q, step)
        if self.inner.setup.plan.roles[layer] is Role.SPARSE:
            self.mass[layer] = self._kept(layer, q, step)
        return out

    def attend_local(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attend as the inner runtime in a sliding-window layer, which keeps all it may see."""
        return self.inner.attend_local(layer, q, step)

    def _kept(self, layer: int, q: torch.Tensor, step: Step) -> float:
        n, start = int(step.visible[0]), int(self.inner.tail_start(step)[0])
        return self.kept(self.inner.chosen_rows(layer), self._weights(layer, q, step, n), start)

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
        return float((kept + weights[:, start:].sum(-1)).mean())


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
