"""ZigZagKV: SnapKV with layer budgets that follow how many tokens a layer's attention needs.

Source: Zhong et al., ZigZagKV (COLING 2025), by its abstract, and by the implementation in kvpress
of its Equation 6. A head needs as many tokens as hold `mass` of its attention; a layer, the mean
over its heads, LMBA. With B the budget of the mean layer, every layer gets floor * B, and the rest
is dealt in proportion to LMBA. Attention is what the window's queries give, mean over them.
Defaults: 90% and a floor of 20%. With equal needs it is SnapKV.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.bank.base import Step
from engine.base.checks import fraction
from engine.methods.base import Runtime, Setup
from engine.methods.evict.shared.store import Sequence, rounded
from engine.methods.evict.snapkv import SnapKV, SnapRuntime
from kernels.select.column_sums import column_sums


@dataclass(frozen=True)
class ZigZagKV(SnapKV):
    """mass: share of a head's attention that its tokens must hold. floor: share of the mean budget
    that every layer gets; 1 makes all layers equal.
    """

    full_prompts = True

    mass: float = 0.9
    floor: float = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction("mass", self.mass)
        fraction("floor", self.floor, zero=True)

    def prompt_rows(
        self,
        capacity: int,
        begin: int,
        stop: int,
        total: float,
        room: int,
        first: int | None = None,
    ) -> int:
        """Once more than what is cut alike: for the needs of all layers."""
        rows = super().prompt_rows(capacity, begin, stop, total, room, first)
        return rows if stop < total else rows + stop

    def runtime(self, setup: Setup) -> Runtime:
        return ZigZagRuntime(self, setup)


class ZigZagRuntime(SnapRuntime):
    """One session's stores, whose layers hold different numbers of tokens."""

    method: ZigZagKV

    def layer_budgets(self, length: int, step: Step) -> list[int]:
        """Never below the window, with the sum of equal ones."""
        method, budget = self.method, self.method.budget(self.plan, length)
        sequence = self.sequences[0]
        needs = [self._needed(sequence, layer, length, step) for layer in self.evicting]
        found = torch.stack(needs)
        low = max(min(method.window, length), int(method.floor * budget))
        return dealt(found.tolist(), min(budget, length), low, length)

    def _needed(self, sequence: Sequence, layer: int, length: int, step: Step) -> torch.Tensor:
        """LMBA of a layer: a float64 scalar."""
        window, needs = min(self.method.window, length), []
        for heads, k, _, _ in self.live(layer, step.bank, length):
            q = self.newest_queries(sequence, layer, heads, window, step)
            given = k.shape[1] - window, self.scale
            sums = column_sums(q, k, *given, softmax=self.softmax_of(layer, heads))
            mass = sums.flatten(0, 1).sort(-1, descending=True).values.double().cumsum(-1)
            needs.append((mass < self.method.mass * mass[:, -1:]).sum(-1) + 1)
        return torch.cat(needs).double().mean()


def dealt(needs: list[float], mean: int, low: int, high: int) -> list[int]:
    """Budgets of layers, low .. high each, in proportion to their needs above `low`; their sum is
    that of equal ones of `mean`, to the token.
    """
    low = min(low, mean)
    left = float(len(needs) * (mean - low))
    wanted, full = [0.0] * len(needs), [False] * len(needs)
    # what a layer cannot use goes to the others
    while left > 0 and not all(full):
        total = sum(need for need, done in zip(needs, full) if not done)
        given = [0.0 if done else left * need / total for need, done in zip(needs, full)]
        wanted = [min(float(high - low), w + more) for w, more in zip(wanted, given)]
        left = len(needs) * (mean - low) - sum(wanted)
        if left < 1e-6:
            break
        full = [w >= high - low for w in wanted]
    counts = rounded(wanted, len(needs) * (mean - low), [high - low] * len(needs))
    return [low + count for count in counts]
