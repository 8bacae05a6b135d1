"""Eviction by accumulated attention (hook B): every row carries, per query head, what the queries
since its arrival have given it.

Shared by H2O, H2O+, A2SF, Keyformer and Scissorhands, which differ in what a query adds, how the
past decays, and when rows are dropped. Sums are taken tile by tile (kernels/column_sums.py). While
a first prompt is read and until its cut, the sums of all rows exist: 4 bytes per query head and
token, twice while a chunk runs.
"""

from dataclasses import dataclass

import torch

from engine.methods.evict.base import GROUP_RULES, Evicting, EvictingRuntime
from engine.methods.evict.store import best, reduce_group, worst
from engine.methods.settings import choice, portion, whole
from kernels.column_sums import column_sums


@dataclass(frozen=True)
class Accumulating(Evicting):
    """Settings of the family. recent_share: part of the budget that the newest tokens have for
    themselves. gqa_reduce: how the scores of the query heads of a group become one ("max" | "mean"
    | "sum"), after they have been summed. cut: a first prompt is cut at its end ("prefill") or
    after the first step of the answer, which then sees everything ("first_step"). every: steps
    between evictions.
    """

    recent_share: float = 0.5
    gqa_reduce: str = "max"
    cut: str = "prefill"
    every: int = 1

    named = False
    scored = True

    def __post_init__(self):
        super().__post_init__()
        portion("recent_share", self.recent_share, zero=True)
        choice("gqa_reduce", self.gqa_reduce, GROUP_RULES)
        choice("cut", self.cut, ("prefill", "first_step"))
        whole("every", self.every, 1)

    def recent(self, budget):
        """How many of a budget's tokens are the newest ones."""
        return int(budget * self.recent_share)

    def decay(self, count):
        """What is left of the scores after `count` more queries."""
        return 1.0

    def most(self, budget):
        """The budget, and the tokens that come before the next eviction."""
        return budget + self.every

    def course(self, budget, length, generated):
        """(base, held) by the rules of `trim`."""
        if self.cut == "first_step":
            length, generated = length + 1, generated - 1
        base = held = min(length, budget)
        for _ in range(generated):
            held += 1
            if held >= budget + self.every:
                base, held = (base if self.every == 1 else budget), budget
        return base, held

    def held_bytes(self, plan, config, itemsize, prompt, generated=0):
        """As Evicting's; where nothing is cut yet, the scores of all tokens."""
        if self.cut == "first_step" and generated == 0:
            return 4 * config.num_layers * config.num_heads * prompt
        return super().held_bytes(plan, config, itemsize, prompt, generated)

    def store_bytes(self, plan, config, itemsize, capacity):
        """The store, and twice the scores of a whole prompt."""
        return (
            super().store_bytes(plan, config, itemsize, capacity)
            + 8 * config.num_layers * config.num_heads * capacity
        )

    def runtime(self, setup):
        """Stores and sums of one session."""
        return AccumulatingRuntime(self, setup)


class AccumulatingRuntime(EvictingRuntime):
    """One session's stores with their scores."""

    reads_every_query = True

    def begin_prefill(self, start, stop, more=False):
        """Scores of everything that this prompt's queries will see: those of the store, and zeros."""
        super().begin_prefill(start, stop, more)
        sequence, old = self.sequences[0], self.sequences[0].sums
        sequence.sums = []
        for layer in range(self.plan.num_layers):
            if sequence.layers is None:
                before = None if old is None else old[layer]
            else:
                before = torch.cat(
                    [rows.scores[:, :, : rows.held] for rows in sequence.layers[layer]]
                )
            held = 0 if before is None else before.shape[2]
            fresh = stop - (sequence.since if sequence.layers is not None else held)
            sums = torch.zeros(
                self.heads, self.setup.config.group, held + fresh, device=self.setup.device
            )
            if held:
                sums[:, :, :held] = before
            sequence.sums.append(sums)

    def end_prefill(self, length, step=None):
        """As Evicting's; rows that nobody has read (a synthetic bank) have had no attention."""
        if step is not None and not self.reading:
            self.begin_prefill(self.sequences[0].length, length)
        super().end_prefill(length, step)

    def observe(self, sequence, layer, number, q, k, first, start):
        """Leave this chunk's or step's column sums pending; a chunk's last query that comes once
        more for its output is in them already.
        """
        if not self.reading or (sequence, layer, number) not in self.pending:
            self.pending[sequence, layer, number] = self.added(
                sequence, layer, number, q, k, first, start
            )

    def added(self, sequence, layer, number, q, k, first, start):
        """What queries q [C, H', D] at positions from `start` on add to rows k [h, T, D]: [h, G,
        T]; query j sees rows < first + j + 1.
        """
        return column_sums(q, k, first, self.scale)

    def commit(self, b, sequence, count):
        """Decay what there is and add what is pending."""
        decay = self.method.decay(count)
        if sequence.layers is not None and not self.reading:
            for layer, parts in enumerate(sequence.layers):
                for number, rows in enumerate(parts):
                    new = self.pending[b, layer, number]
                    rows.scores[:, :, : new.shape[2]].mul_(decay).add_(new)
            return
        if sequence.sums is None:
            sequence.sums = [
                torch.zeros(self.heads, self.setup.config.group, 0, device=self.setup.device)
            ] * self.plan.num_layers
        for layer, old in enumerate(sequence.sums):
            new = self.pending[b, layer, 0]
            if old.shape[2] < new.shape[2]:
                old = torch.cat(
                    [old, old.new_zeros(*old.shape[:2], new.shape[2] - old.shape[2])], 2
                )
            old[:, :, : new.shape[2]].mul_(decay).add_(new)
            sequence.sums[layer] = old

    def keys(self, scores, positions, length, budget):
        """What is ranked [h, T]: scores reduced over the group, infinite for the newest of `length`
        tokens.
        """
        keys = reduce_group(scores, self.method.gqa_reduce)
        return keys.masked_fill(positions >= length - self.method.recent(budget), float("inf"))

    def choose(self, sequence, layer, parts, step):
        """The newest tokens and the highest scores."""
        (part,), budget = parts, sequence.budgets[layer]
        return [(part, best(self.keys(part[4], part[3], sequence.length, budget), part[3], budget))]

    def trim(self, rows, budget, sequence):
        """Drop what is over the budget, every so many steps."""
        if rows.held < budget + self.method.every:
            return rows
        keys = self.keys(
            rows.scores[:, :, : rows.held], rows.positions[:, : rows.held], sequence.length, budget
        )
        if rows.held == budget + 1:
            rows.drop(worst(keys, rows.positions[:, : rows.held]))
            return rows
        return rows.keep(
            best(keys, rows.positions[:, : rows.held], budget), self.method.most(budget)
        )
