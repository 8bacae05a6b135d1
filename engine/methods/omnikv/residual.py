"""What OmniKV does not choose is estimated: of its budget some tokens are drawn by chance from all
that were not chosen, and each stands for as many as were left (`residual="sample"`).

Source: Desai et al., vAttention (2025), section 4: attention is a quotient of sums over all tokens,
and each sum is that over the chosen tokens and (n - k) / m times that over m of the n - k others,
drawn uniformly without replacement, whose expectation is the sum over all. The factor is a weight
log((n - k) / m) on the logits of the drawn tokens. Differs: the paper draws for each query head and
as many as its error bound asks for; here a group's layers and heads read the same tokens, in one
load, and the chosen and the drawn ones are together as many as OmniKV chooses alone: the plan and
the bytes of a step are its own. `residual="unweighted"` is the control: the same tokens, each for
itself.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.bank.base import Step
from engine.base.device import carried
from engine.methods.base import Setup, device_int
from engine.methods.omnikv.runtime import OmniKVRuntime
from engine.methods.omnikv.settings import Settings
from engine.methods.random_bits import draw, factors, numbers
from kernels.select.topk import select_topk

NOBODY = (1 << 31) - 1  # sorts behind every token
# bytes that a draw moves per token: its number, its chance written, and read twice to be ranked
DRAWING = 16


class ResidualRuntime(OmniKVRuntime):
    """Buffers beside OmniKV's: chance float32 [B, capacity], of which tokens are drawn; numbers
    int32 [capacity]; per group the drawn tokens int32 [B, m] and logs float32 [B, K], the weight
    of every entry of its index. Nothing visits the host.
    """

    def __init__(self, method: Settings, setup: Setup):
        self.sampled = device_int(0, setup)
        super().__init__(method, setup)
        batch, capacity = self.scores.shape
        selected, device = self.needs.selected, setup.device
        most = method.drawn(selected)
        self.chance = torch.empty(batch, capacity, device=device)
        self.numbers = numbers(method.residual_seed, capacity, device)
        self.drawn = torch.empty(batch, most, dtype=torch.int32, device=device)
        self.drawn_count = device_int(0, setup)
        self.logs = [torch.zeros(batch, selected, device=device) for _ in self.plan.groups]

    @property
    def nbytes(self) -> int:
        own = (self.chance, self.numbers, self.drawn, *self.logs)
        return super().nbytes + sum(t.nbytes for t in own)

    def _set_k(self, k: int) -> None:
        """k tokens are read, of which the highest scores choose all that are not drawn."""
        super()._set_k(k)
        drawn = self.method.drawn(k)
        self.k_device.fill_(k - drawn)
        self.sampled.fill_(drawn)

    def choose(self, group: int, scores: torch.Tensor, step: Step, counted: bool = False) -> None:
        """As OmniKV, the fewer tokens; then draw others and put both into one ascending list."""
        super().choose(group, scores, step, counted)
        stop, index, counts = (
            step.tail_start(self.method.tail),
            self.index[group],
            self.counts[group],
        )
        chance = self.chance[:, : scores.shape[1]]
        draw(
            self.numbers[: step.bucket],
            factors(step.visible, self.method.residual_seed, self.plan.number_of(group)),
            chance,
        )
        entry = torch.arange(index.shape[2], device=index.device)
        chosen = entry < counts[:, None]
        # what is no entry marks a token of the tail, which nobody draws
        chance.scatter_(1, torch.where(chosen, index[:, 0], stop[:, None]).long(), 0.0)
        rest = stop - counts
        select_topk(
            chance,
            self.zero,
            stop,
            torch.minimum(self.sampled, rest),
            self.drawn,
            self.drawn_count,
            scratch=self.setup.scratch,
            backend=self.setup.backend,
        )
        self._join(group, chosen, rest)

    def _join(self, group: int, chosen: torch.Tensor, rest: torch.Tensor) -> None:
        """The group's list of chosen tokens, where chosen [B, K] says so, and of drawn ones, of
        which each stands for its part of `rest` [B].
        """
        index, count = self.index[group][:, 0], self.drawn_count[:, None]
        drawn = torch.arange(self.drawn.shape[1], device=index.device) < count
        both = torch.cat(
            [
                torch.where(chosen, index * 2, NOBODY),
                torch.where(drawn, self.drawn * 2 + 1, NOBODY),
            ],
            1,
        )
        both = both.sort(1).values[:, : index.shape[1]]
        index.copy_(torch.where(both == NOBODY, -1, both >> 1))
        self.counts[group] += self.drawn_count
        if self.method.residual == "sample":
            weight = (rest[:, None] / count.clamp(min=1)).log()
            self.logs[group].copy_(torch.where((both & 1 == 1) & (both != NOBODY), weight, 0.0))

    def receive(self, group: int, other: Any, theirs: int) -> None:
        super().receive(group, other, theirs)
        carried(other.logs[theirs], self.logs[group])

    def weights(self, group: int) -> torch.Tensor:
        return self.logs[group]

    def drawn_rows(self, layer: int) -> torch.Tensor:
        rows, group = self.chosen_rows(layer), self._group(layer)
        return rows[self.logs[group][0, : len(rows)] > 0]

    def choice(self) -> Any:
        """And what each entry stands for, behind what OmniKV's is."""
        return [*super().choice(), *(logs.clone() for logs in self.logs)]

    def load_choice(self, choice: Any) -> None:
        count = len(choice) - len(self.logs)
        super().load_choice(choice[:count])
        for mine, theirs in zip(self.logs, choice[count:]):
            mine.copy_(theirs)
