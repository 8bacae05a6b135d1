"""Eviction by accumulated attention. Each cached token stores, per query head, the sum of attention
weights it has received.

Shared by H2O, H2O+, A2SF, Keyformer and Scissorhands, which differ in what a query adds, how the
past decays, and when tokens are dropped. Sums are taken tile by tile
(kernels/select/column_sums.py). While a first prompt is read and until its cut, the sums of all
tokens exist: 4 bytes per query head and token, twice while a chunk runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.bank.base import Step
from engine.base.checks import fraction, integer, one_of
from engine.methods.base import Runtime, Setup
from engine.methods.evict.shared.runtime import EvictingRuntime
from engine.methods.evict.shared.settings import Evicting
from engine.methods.evict.shared.store import Part, Rows, Sequence, best
from engine.methods.evict.shared.windows import spread
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from kernels.attention.dense import decode_logged
from kernels.kept.step import kept_step
from kernels.launch.softmax import Softmax
from kernels.native.own_pages import copied
from kernels.select.column_sums import Change, column_sums
from kernels.select.drop import RULES, reduce_group


@dataclass(frozen=True)
class Accumulating(Evicting):
    """Settings of the family. recent_share: part of the budget that is reserved for the newest
    tokens. gqa_reduce: how the summed scores of a group's query heads become one: "max" | "mean" |
    "sum". cut: a first prompt is cut at its end ("prefill") or after the first step of the answer,
    which then sees everything ("first_step"). every: steps between evictions.
    """

    recent_share: float = 0.5
    gqa_reduce: str = "max"
    cut: str = "prefill"
    every: int = 1

    named = False
    scored = True

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction("recent_share", self.recent_share, zero=True)
        one_of("gqa_reduce", self.gqa_reduce, RULES)
        one_of("cut", self.cut, ("prefill", "first_step"))
        integer("every", self.every, 1)

    def recent(self, budget: int) -> int:
        """How many of a budget's tokens are the newest ones."""
        return int(budget * self.recent_share)

    def decay(self, count: int) -> float:
        """Factor by which `count` more queries shrink the scores."""
        return 1.0

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        found = super().needs(plan, config, capacity, itemsize)
        return replace(found, every_query=True, row_scores=self.row_scores(plan, config))

    def max_rows(self, budget: int) -> int | None:
        """The budget, and the tokens that come before the next eviction."""
        return budget + self.every

    def course(self, budget: int, length: int, generated: int) -> tuple[int, int]:
        if self.cut == "first_step":
            length, generated = length + 1, generated - 1
        base = held = min(length, budget)
        for _ in range(generated):
            held += 1
            if held >= budget + self.every:
                base, held = (base if self.every == 1 else budget), budget
        return base, held

    def held_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, prompt: int, generated: int = 0
    ) -> int:
        """Where nothing is cut yet, the scores of all tokens."""
        if self.cut == "first_step" and generated == 0:
            heads = len(plan.partial_layers) * config.num_kv_heads
            return 4 * heads * self.scores_of(config) * prompt
        return super().held_bytes(plan, config, itemsize, prompt, generated)

    def store_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int
    ) -> int:
        """The store, and twice the scores of a whole prompt."""
        scores = self.row_scores(plan, config) * capacity
        return super().store_bytes(plan, config, itemsize, capacity) + scores

    def row_scores(self, plan: LayerPlan, config: ModelConfig) -> int:
        """Bytes of a prompt's scores, held twice, of one row in all layers that evict."""
        return 8 * len(plan.partial_layers) * config.num_kv_heads * self.scores_of(config)

    def runtime(self, setup: Setup) -> Runtime:
        return AccumulatingRuntime(self, setup)


class AccumulatingRuntime(EvictingRuntime):
    """One session's stores with their scores."""

    method: Accumulating
    leaves = "weights"  # what a step in one call leaves: "logits" for an `added` that changes them

    def __init__(self, method: Evicting, setup: Setup):
        super().__init__(method, setup)
        # of the query that has just attended: one of them, where its kernel leaves it
        self.logits: torch.Tensor | None = None
        self.weights: torch.Tensor | None = None

    def attend_step(
        self,
        sequence: Sequence,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: torch.Tensor | None,
        at: int,
        softmax: Softmax,
    ) -> torch.Tensor:
        """Leave the query's logits too, where the kernel does."""
        given = self.scale, self.setup.scratch, self.setup.backend, softmax
        out, self.logits = decode_logged(q, k, v, *given)
        return out

    def attend_in_one_call(
        self,
        sequence: Sequence,
        layer: int,
        rows: Rows,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        at: int,
        softmax: Softmax,
    ) -> torch.Tensor:
        """Leave what the query weighs too, or its logits."""
        given = at, self.scale, softmax, self.leaves
        out, left = kept_step(q, k, v, rows.store(), *given)
        self.logits, self.weights = (None, left) if self.leaves == "weights" else (left, None)
        return out

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        """Allocate scores of everything that this prompt's queries will see: those of the store,
        those that the prompt's parts before this one have left, and zeros.
        """
        sequence, goes_on = self.sequences[0], self.reading or self.sequences[0].layers is None
        super().begin_prompt(start, stop, more)
        old, found = sequence.sums if goes_on else None, []
        for layer in self.evicting:
            before, held = None if old is None else old[layer], 0
            if sequence.layers is not None:
                scores = [rows.part().scores for rows in sequence.layers[layer]]
                store = torch.cat([t for t in scores if t is not None])
                before, held = store if before is None else before, store.shape[2]
            seen = held + sequence.length - sequence.since
            sums = torch.zeros(
                self.heads,
                self.method.scores_of(self.setup.config),
                seen + stop - sequence.length,
                device=self.setup.device,
            )
            if before is not None:
                # an interrupted call has left room for more than it has read
                known = min(seen, before.shape[2])
                sums[:, :, :known] = before[:, :, :known]
            found.append(sums)
        sequence.keep_sums(spread(self.plan, found, self.no_scores()))

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        """Tokens that nobody has read (a synthetic bank) have received no attention."""
        if step is not None and not self.reading:
            self.begin_prompt(self.sequences[0].length, length)
        super().end_prompt(length, step)

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
        """Leave this chunk's or step's column sums pending; a chunk's last query, which comes once
        more for its output, is in them already.
        """
        if not self.reading or (b, layer, number) not in self.pending:
            new = self.added(b, layer, number, q, k, first, start)
            # a chunk's outlive what its layers make
            self.pending[b, layer, number] = copied(new) if self.reading else new
        self.logits = self.weights = None

    def column_sums(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        first: int,
        each: Change | None = None,
        change: Change | None = None,
        tau: float = 1.0,
    ) -> torch.Tensor:
        """As kernels/select/column_sums.py; a step's of what its attention has left. tau: what
        `change` divides logits by, and the layer's sinks are divided by.
        """
        if not len(q):
            return torch.zeros(len(k), q.shape[1] // len(k), k.shape[1], device=q.device)
        if self.weights is not None and len(q) and change is None and not self.reading:
            found = self.weights
            if each is not None:
                found = each(found, slice(0, 1), slice(0, found.shape[3]))
            return found.squeeze(2)
        softmax = self.softmax[layer]
        if softmax.sinks is not None and tau != 1.0:
            softmax = replace(softmax, sinks=softmax.sinks / tau)
        # of a query that counts; an interrupted step may have left its own behind
        logits = self.logits if len(q) and not self.reading else None
        return column_sums(q, k, first, self.scale, each, change, logits, softmax)

    def added(
        self,
        b: int,
        layer: int,
        number: int,
        q: torch.Tensor,
        k: torch.Tensor,
        first: int,
        start: int,
    ) -> torch.Tensor:
        """Scores [h, G, T] that queries q [C, H', D] at positions from `start` on add to k [h, T,
        D]; query j sees rows < first + j + 1.
        """
        return self.column_sums(layer, q, k, first)

    def add_scores(self, b: int, sequence: Sequence, count: int) -> None:
        """Decay the scores and add what is pending."""
        decay = self.method.decay(count)
        if sequence.layers is not None and not self.reading:
            for layer, parts in enumerate(sequence.layers):
                for number, rows in enumerate(parts):
                    new = self.pending[b, layer, number]
                    assert rows.scores is not None
                    self.add_to(rows.scores, new, decay)
            return
        sums = sequence.sums
        if sums is None:
            sums = [self.no_scores()] * self.plan.num_layers
            sequence.keep_sums(sums)
        for layer in self.evicting:
            old, new = sums[layer], self.pending[b, layer, 0]
            if old.shape[2] < new.shape[2]:
                more = old.new_zeros(*old.shape[:2], new.shape[2] - old.shape[2])
                old = torch.cat([old, more], 2)
            old[:, :, : new.shape[2]].mul_(decay).add_(new)
            sums[layer] = old

    def add_to(self, scores: torch.Tensor, new: torch.Tensor, decay: float) -> None:
        """Add what a step has left pending to a store's scores, which decay first."""
        scores = scores[:, :, : new.shape[2]]
        (scores if decay == 1.0 else scores.mul_(decay)).add_(new)

    def no_scores(self) -> torch.Tensor:
        """Scores of no token."""
        count = self.method.scores_of(self.setup.config)
        return torch.zeros(self.heads, count, 0, device=self.setup.device)

    def rank(self, sequence: Sequence, layer: int, part: Part, step: Step | None) -> torch.Tensor:
        return self.ranked(part, sequence.length, sequence.budgets[layer])

    def ranked(self, part: Part, length: int, budget: int) -> torch.Tensor:
        """Scores [h, T] reduced over the group, infinite for the newest of `length` tokens."""
        assert part.scores is not None
        scores = reduce_group(part.scores, self.method.gqa_reduce)
        newest = part.positions >= length - self.method.recent(budget)
        return scores.masked_fill(newest, float("inf"))

    def trim(self, rows: Rows, budget: int, sequence: Sequence, layer: int) -> Rows:
        """Drop what is over the budget, every so many steps."""
        if rows.held < budget + self.method.every:
            return rows
        if rows.held == budget + 1:
            self.drop(rows, budget, sequence)
            return rows
        part = rows.part()
        scores = self.ranked(part, sequence.length, budget)
        index = best(scores, part.positions, budget)
        return Rows.gather(part, index, self.method.max_rows(budget))

    def drop(self, rows: Rows, budget: int, sequence: Sequence) -> None:
        """Drop the one row per head that `ranked` gives the least."""
        newest = sequence.length - self.method.recent(budget)
        rows.drop_least(self.setup.backend, self.method.gqa_reduce, keep_from=newest)
