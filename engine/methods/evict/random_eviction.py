"""Random eviction, with the prompt kept and without: what a table of evicting methods must show
that its scores are worth.

Source: the abstract of Wang et al., Random Attention (arXiv 2609.03430, 2026): the prompt is kept,
and generated tokens go uniformly at random, in each head for itself; it matches the best evictors
on reasoning. The recent tokens and the cut every 64 are those of the randkv package, which cites
it. Every cut draws anew, so that a token's chance to stay falls with its age.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.bank.base import Step
from engine.base.checks import integer
from engine.methods.base import Runtime, Setup
from engine.methods.evict.keyformer import gumbel
from engine.methods.evict.shared.periodic import Periodic, PeriodicRuntime
from engine.methods.evict.shared.store import Part, Rows, Sequence
from engine.plan.layers import LayerPlan


@dataclass(frozen=True)
class RandomEvictionAll(Periodic):
    """A control: every token's chance is the same, a prompt's too. recent: newest tokens that stay,
    at most half of the budget. seed: of the draws, which depend only on it and on (layer, head,
    position, length at the cut), never on how a prompt is cut or what runs beside.
    """

    full_prompts = True

    recent: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("recent", self.recent, 0)
        integer("seed", self.seed, 0)

    @property
    def name(self) -> str:
        return "random_eviction_all"

    def runtime(self, setup: Setup) -> Runtime:
        return RandomRuntime(self, setup)


class RandomRuntime(PeriodicRuntime):
    """One session's stores, drawn anew at every cut."""

    method: RandomEvictionAll

    def rank(self, sequence: Sequence, layer: int, part: Part, step: Step | None) -> torch.Tensor:
        """A number by chance, infinite for the newest tokens."""
        recent = min(self.method.recent, sequence.budgets[layer] // 2)
        scores = draws(self.method.seed, self.plan.first + layer, part, sequence.length)
        return scores.masked_fill(part.positions >= sequence.length - recent, float("inf"))


def draws(seed: int, layer: int, part: Part, length: int) -> torch.Tensor:
    """Gumbel noise float32 [h, T] of a part's tokens, for the cut at `length` tokens."""
    positions = part.positions.long()
    heads = torch.arange(part.heads.start, part.heads.stop, device=positions.device).unsqueeze(1)
    at = torch.full((1,), length, dtype=torch.int64, device=positions.device)
    return gumbel(seed, layer, heads, at, positions)[:, 0, 0]


@dataclass(frozen=True)
class RandomEviction(RandomEvictionAll):
    """Budget: tokens | share of the prompt, of an answer, beside everything that is held when the
    latest prompt ends. recent: newest tokens that stay, at most half of it.
    """

    full_prompts = True

    @property
    def name(self) -> str:
        return "random_eviction"

    def answer(self, length: int) -> int:
        """Tokens of an answer that stay after a prompt that ended at `length`."""
        if self.tokens is not None:
            return self.tokens
        assert self.share is not None
        return max(1, math.floor(self.share * length))

    def default_budget(self) -> dict[str, int]:
        return {"tokens": 2048}

    def budget(self, plan: LayerPlan, length: int) -> int:
        """The prompt, and what stays of its answer."""
        return length + self.answer(length)

    def runtime(self, setup: Setup) -> Runtime:
        return PromptKeptRuntime(self, setup)


class PromptKeptRuntime(RandomRuntime):
    """Only tokens of the answer under way may go. What earlier answers have left is of the prompt
    that follows them.
    """

    method: RandomEviction

    def rank(self, sequence: Sequence, layer: int, part: Part, step: Step | None) -> torch.Tensor:
        recent = min(self.method.recent, self.method.answer(sequence.prompt) // 2)
        stays = part.positions >= sequence.length - recent
        stays |= part.positions < sequence.prompt
        scores = draws(self.method.seed, self.plan.first + layer, part, sequence.length)
        return scores.masked_fill(stays, float("inf"))

    def trim(self, rows: Rows, budget: int, sequence: Sequence, layer: int) -> Rows:
        """Cut where the answer, not the store, is full: it may hold less than all of the prompt."""
        over = sequence.length - sequence.prompt - self.method.answer(sequence.prompt)
        if over < self.method.every or over % self.method.every:
            return rows
        return super().trim(rows, rows.held - self.method.every, sequence, layer)
