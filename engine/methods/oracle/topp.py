"""Oracle top-p: every list takes the fewest tokens that have the share p of its own attention. How
few could do, if somebody told which.

Source: none of its own; the bound of budgets that follow the attention, as top-p sampling follows
probabilities (Holtzman et al., The Curious Case of Neural Text Degeneration, ICLR 2020, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.bank.base import Step
from engine.base.checks import fraction, integer
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.oracle.topk import OracleRuntime, OracleTopK
from engine.methods.select.base import mean_counts
from engine.plan.layers import Role, tail_start


@dataclass(frozen=True)
class OracleTopP(OracleTopK):
    """p: of a list's attention, over all that its newest query sees, in (0, 1]; 1.0 takes every
    token. floor: tokens that a list takes at least; tokens | share: at most (Budgeted's budget),
    which the plan counts. granularity: "layer" | "kv_head", whose lists then differ in length.
    """

    full_prompts = True

    granularity: str = "kv_head"
    p: float = 0.95
    floor: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction("p", self.p)
        integer("floor", self.floor, 1)
        if self.granularity == "query_head":
            raise SettingError(
                "granularity: found 'query_head', but lists of different lengths are of a layer or "
                "of its K/V heads: expected 'layer' or 'kv_head'"
            )
        if self.share is None:
            self._check(self.budget(0), "")

    @property
    def name(self) -> str:
        return "oracle_topp"

    def validate_prompt(self, start: int, stop: int) -> None:
        """A share may be less than the floor."""
        if self.share is not None:
            self._check(self.budget(stop), f", share {self.share:g} of {stop:,}")

    def _check(self, ceiling: int, why: str) -> None:
        if ceiling < self.floor:
            raise SettingError(
                f"floor: found {self.floor}, above the ceiling of {ceiling} tokens{why}: lower it, "
                "or raise tokens or share"
            )

    def runtime(self, setup: Setup) -> Runtime:
        return TopPRuntime(self, setup)


class TopPRuntime(OracleRuntime):
    """A list's length is known on the device only: `rows_read` asks once a step, for all layers."""

    method: OracleTopP
    apart = True
    _lengths: tuple[int, ...] = (0,)  # tokens of each sequence in the step that chose last

    def covers(self, candidates: int) -> bool:
        """Only where nothing may be left out."""
        return candidates <= (self.k if self.method.p == 1 else self.method.floor)

    def score(self, layer: int, q: torch.Tensor, step: Step, lengths: list[int]) -> None:
        """And zero what an earlier step has left behind the tokens."""
        super().score(layer, q, step, lengths)
        lists, self._lengths = len(self.scores) // len(q), tuple(lengths)
        for b, n in enumerate(lengths):
            self.scores[b * lists : (b + 1) * lists, n : max(lengths)] = 0.0

    def budgets(self, step: Step, stop: torch.Tensor) -> torch.Tensor:
        """The fewest tokens before the tail that reach p together with it."""
        if self.method.p == 1:
            return torch.full_like(stop, self.k)
        scores = self.scores[:, : max(self._lengths)]
        places = torch.arange(scores.shape[1], device=scores.device)
        ours = scores.masked_fill(places >= stop.unsqueeze(1), 0.0)
        most = min(ours.shape[1], max(self.method.floor, self.k))
        reached = ours.topk(most, 1).values.cumsum(1, dtype=torch.float64)
        total, before = (some.sum(1, dtype=torch.float64) for some in (scores, ours))
        missing = (self.method.p - 1) * total + before  # what the tail has not
        wanted = (reached < missing.unsqueeze(1)).sum(1) + (missing > 0)
        return wanted.clamp_(self.method.floor, max(self.method.floor, self.k)).int()

    def rows_read(self, n: int) -> list[int]:
        """The mean over the lists of the step that has just run at n tokens, rounded up; the most
        that a step at another length reads.
        """
        if n != self._lengths[0] or not self.chosen:
            return super().rows_read(n)
        newest = n - tail_start(n, self.method.tail) if self.method.tail else 0
        read, seen = mean_counts(self.chosen), self.setup.config.rows_seen(n)
        for layer, role in enumerate(self.plan.roles):
            if role is Role.SPARSE and self.group(layer) in read:
                seen[layer] = read[self.group(layer)] + newest
        return seen

    def truncate(self, length: int) -> None:
        self._lengths = (0,)
