"""SirLLM: the first tokens, the newest, and of the others those that surprised the model most.

Source: Yao et al., SirLLM (ACL 2024), by its abstract and its published code. The surprise of a
token is -log p(token | those before it); what attention does has no part in it, so that every layer
and head holds the same tokens. Scores shrink by a ratio when a new turn begins. As in StreamingLLM,
a token's position is its slot in the cache. Defaults: the code's 4 sinks and 1,020 other tokens,
decay 1 (its examples have 0.7 to 1).

The code reads a turn in one piece, for which it makes room first; a turn must fit. Here a prompt of
any length is read in segments: before each the store gives up as many tokens as may come, so that
no query sees more than the budget. The newest tokens stay, whatever their surprise, where the
code's examples keep none: what a model has just written surprises it least of all, and in the code
a turn sees all of itself. The first token of all, which nothing comes before, has the surprise 0.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from engine.bank.base import Bank, Step
from engine.base.checks import fraction, integer
from engine.base.errors import SettingError
from engine.methods.base import Logits, Runtime, Setup
from engine.methods.evict.shared.by_position import Windowed, WindowedRuntime, slot_logits
from engine.methods.evict.shared.runtime import EvictingRuntime
from engine.methods.evict.shared.store import Part, Rows, Sequence, best
from engine.methods.evict.shared.windows import spread
from engine.methods.select.events.surprise import logits_bytes, surprises
from engine.model.config.config import ModelConfig
from engine.model.rope import Rotary
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from kernels.launch.softmax import Softmax
from kernels.rows.forms import floats, is_packed, key_floats
from kernels.select.drop import worst

MOST = 128  # tokens of a segment, and newest tokens that stay, unless they are said


class Parts(NamedTuple):
    """Tokens of a budget: sinks, the newest that stay, and room for a segment of a prompt."""

    sinks: int
    recent: int
    segment: int


@dataclass(frozen=True)
class SirLLM(Windowed):
    """tokens | share: the most that a query sees, itself included. sink: first tokens that stay.
    recent: newest tokens that stay. segment: tokens of a prompt that are read between two cuts.
    None: an eighth of the budget, at most 128. decay: by which scores shrink from turn to turn.
    """

    sink: int = 4
    recent: int | None = None
    segment: int | None = None
    decay: float = 1.0

    scored = True

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("sink", self.sink, 0)
        for name, least in (("recent", 0), ("segment", 1)):
            if getattr(self, name) is not None:
                integer(name, getattr(self, name), least)
        fraction("decay", self.decay)
        if self.tokens is not None and sum(self._wanted(self.tokens)) >= self.tokens:
            sink, recent, segment = self._wanted(self.tokens)
            raise SettingError(
                f"sink, recent, segment: found {sink} + {recent} + {segment}, expected fewer than "
                f"the budget of {self.tokens} tokens"
            )

    @property
    def smallest(self) -> int:
        """The fewest tokens that a budget may have."""
        return sum(self._wanted(1)) + 1

    def default_budget(self) -> dict[str, int]:
        """4 sinks and 1,020 others."""
        return {"tokens": 1024}

    def _wanted(self, budget: int) -> Parts:
        each = max(1, min(MOST, budget // 8))
        recent = each if self.recent is None else self.recent
        return Parts(self.sink, recent, self.segment or each)

    def parts(self, budget: int) -> Parts:
        """What becomes of a budget; one by share may have less room than is wanted."""
        sinks, recent, segment = self._wanted(budget)
        segment = min(segment, budget - sinks - 2)
        return Parts(sinks, min(recent, budget - sinks - segment - 1), segment)

    def sinks(self, budget: int, length: int) -> int:
        return self.sink

    def budget(self, plan: LayerPlan, length: int) -> int:
        """Room for the sinks, a segment, and two more, however short the text."""
        return max(self.sink + 3, super().budget(plan, length))

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        found = super().needs(plan, config, capacity, itemsize)
        return replace(found, outputs=True, piece=self.waiting(capacity))

    def prompt_bytes(self, config: ModelConfig, capacity: int, chunk: int, itemsize: int) -> int:
        """Some rows of logits, and what their sums take."""
        return logits_bytes(config.vocab_size, chunk)

    def scores_of(self, config: ModelConfig) -> int:
        """The surprise: one number for all query heads."""
        return 1

    def waiting(self, capacity: int) -> int:
        """A segment that has begun."""
        if self.tokens is not None:
            return min(capacity, self.parts(self.tokens).segment)
        return min(capacity, self.segment or MOST)

    def point_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int
    ) -> int:
        return super().point_bytes(plan, config, itemsize, capacity) + 4 * config.vocab_size

    def held_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, prompt: int, generated: int = 0
    ) -> int:
        """The stores, and the newest token's logits."""
        held = super().held_bytes(plan, config, itemsize, prompt, generated)
        return held + 4 * config.vocab_size

    def store_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int
    ) -> int:
        """The stores before and after a cut, a prompt's scores, and the logits of two tokens."""
        scores = 8 * (self.budget(plan, capacity) + 1)
        stores = 2 * super().store_bytes(plan, config, itemsize, capacity)
        return stores + scores + 8 * config.vocab_size

    def course(self, budget: int, length: int, generated: int) -> tuple[int, int]:
        """What the last cut has left, and what has come since."""
        segment = self.parts(budget).segment
        whole = length // segment * segment
        base = min(whole, budget - segment) + length - whole
        return base, min(base + generated, budget)

    def forgotten(self, length: int) -> str:
        if self.tokens is None or length <= self.tokens:
            return ""
        recent = self.parts(self.tokens).recent
        return (
            f"from here on, beyond {self.sink} sinks and the newest {recent:,}, the tokens that "
            f"surprised the model least are forgotten; {self.tokens:,} are held"
        )

    def sink_logits(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        at: torch.Tensor,
        sinks: int,
        window: int,
        rotary: Rotary,
    ) -> torch.Tensor:
        """The query as if it stood in the last slot."""
        return slot_logits(q, k, at, sinks + window, rotary)

    def runtime(self, setup: Setup) -> Runtime:
        return SirLLMRuntime(self, setup)


class SirLLMRuntime(WindowedRuntime):
    """Stores whose scores are surprises. `pending` holds {layer: what a new turn's first chunk has
    left of the store} until `commit`.
    """

    method: SirLLM

    def __init__(self, method: SirLLM, setup: Setup):
        super().__init__(method, setup)
        self.behind: torch.Tensor | None = None  # logits [vocab] of the newest token
        self.next: torch.Tensor | None = None  # of the chunk or step under way
        self.told: torch.Tensor | None = None  # surprises of its tokens
        self.turn = False  # whether a turn begins with the chunk under way
        self.budget = 0  # of the prompt under way

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self.behind is None else self.behind.nbytes)

    @property
    def parts(self) -> Parts:
        """Of the prompt under way."""
        return self.method.parts(self.budget)

    # ---------------------------------------------------------------- surprise

    def hear(self, ids: Tokens[int], logits: Logits) -> None:
        """Score the tokens, some rows of logits at a time."""
        given = ids, logits, self.behind, self.setup.config.vocab_size, self.setup.device
        self.told, self.next = surprises(*given)

    def add_scores(self, b: int, sequence: Sequence, count: int) -> None:
        """Whoever steps without a session tells nothing, and nothing surprises."""
        told = self.told if b == 0 else None
        if told is None:
            told = torch.zeros(count, device=self.setup.device)
        if sequence.layers is not None and not self.reading:
            for parts in sequence.layers:
                for rows in parts:
                    assert rows.scores is not None
                    rows.scores[:, :, rows.held] = told
        else:
            self._keep_scores(sequence, torch.cat([self._scores(sequence), told]))
        if b == 0:
            self.behind, self.next, self.told = self.next, None, None

    def _scores(self, sequence: Sequence) -> torch.Tensor:
        """Scores [T] of the store's tokens and of those after it, as far as they are known."""
        layer = self.evicting[0]
        if sequence.sums is not None:
            return sequence.sums[layer][0, 0]
        if sequence.layers is None:
            return torch.zeros(0, device=self.setup.device)
        scores = sequence.layers[layer][0].part().scores
        assert scores is not None
        return scores[0, 0]

    def _keep_scores(self, sequence: Sequence, scores: torch.Tensor) -> None:
        """Of every layer and head the same."""
        shared = scores.view(1, 1, -1).expand(self.heads, -1, -1)
        sequence.keep_sums(spread(self.plan, [shared] * len(self.evicting), shared[:, :, :0]))

    def rank(self, sequence: Sequence, layer: int, part: Part, step: Step | None) -> torch.Tensor:
        """Surprises, infinite for the sinks and the newest."""
        assert part.scores is not None
        sinks, recent, _ = self.method.parts(sequence.budgets[layer])
        stay = (part.positions < sinks) | (part.positions >= sequence.length - recent)
        return part.scores[:, 0].masked_fill(stay, float("inf"))

    # ---------------------------------------------------------------- a prompt

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        self.turn = self.turn or not self.reading
        super().begin_prompt(start, stop, more)
        self.budget = self.method.budget(self.plan, 0 if more else stop)

    def chunk_stop(self, first: int, stop: int) -> int:
        """No chunk goes beyond its segment."""
        return max(first + 1, min(stop, self.sequences[0].since + self.parts.segment))

    def live(
        self, layer: int, bank: Bank, stop: int, b: int = 0
    ) -> list[tuple[slice, torch.Tensor, torch.Tensor, int]]:
        """Where a turn begins, what is left of a store that has no room for its first segment."""
        sequence = self.sequences[b]
        rows = sequence.layers[layer][0] if sequence.layers else None
        most = self.budget - self.parts.segment if self.reading else 0
        if not self.reading or rows is None or rows.held <= most:
            return super().live(layer, bank, stop, b)
        if layer not in self.pending:
            part = rows.part()
            index = best(self.rank(sequence, layer, part, None), part.positions, most)
            self.pending[layer] = Rows.gather(part, index, self.method.max_rows(self.budget))
        left = self.pending[layer]
        k, v = (t[b] for t in bank.rows(layer, sequence.since, stop))
        return [(left.heads, *self.joined([(left, k, v)])[0], left.held)]

    def attend_rows(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        first: int,
        start: int,
        softmax: Softmax,
    ) -> torch.Tensor:
        """Plain attention to the segment so far, and to a store whose keys are turned to where
        they would stand right before it.
        """
        sequence = self.sequences[0]
        held = first - (start - sequence.since)
        if held and held < sequence.since:
            assert sequence.layers is not None
            rows = self.pending.get(layer) or sequence.layers[layer][0]
            positions = rows.positions[0, :held].long()
            by = sequence.since - held + ranks(positions) - positions
            old, new = self._turned(k[:, :held], by), k[:, held:]
            if is_packed(k):
                new, v = key_floats(new), floats(v).to(q.dtype)
            k = torch.cat([old.to(q.dtype), new.to(q.dtype)], 1)
        return EvictingRuntime.attend_rows(self, layer, q, k, v, first, start, softmax)

    def _turned(self, k: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        """K float32 [h, n, D] of k [h, n, D], as if it stood `by` [n] positions further on."""
        return self.rotary.rotate_by(key_floats(k).transpose(0, 1), by).transpose(0, 1)

    def commit(self, count: int) -> None:
        """Cut at a segment's end, down to where the next one has room."""
        sequence = self.sequences[0]
        if self.reading:
            self._begin_chunk(sequence)
        super().commit(count)
        if self.reading and sequence.length - sequence.since >= self.parts.segment:
            sequence.allot(spread(self.plan, [self.budget] * len(self.evicting), 0))
            self.fold(0, None, self.choose)

    def _begin_chunk(self, sequence: Sequence) -> None:
        """Take what the chunk has left of the store; where a turn begins, scores shrink."""
        for layer, rows in self.pending.items():
            sequence.replace(layer, [rows])
        if self.turn and self.method.decay < 1:
            for parts in sequence.layers or ():
                for rows in parts:
                    assert rows.scores is not None
                    rows.scores.mul_(self.method.decay)
        self.turn = False

    def choose(
        self, sequence: Sequence, layer: int, parts: list[Part], step: Step | None
    ) -> list[tuple[Part, torch.Tensor]]:
        """In a prompt a segment's room is left; of tokens that nobody has read, what would be."""
        budget = sequence.budgets[layer]
        segment, fresh = self.method.parts(budget).segment, sequence.length - sequence.since
        count = budget - segment if self.reading else budget
        if not self.reading and fresh >= segment:
            count += fresh % segment - segment
        return [
            (part, best(self.rank(sequence, layer, part, step), part.positions, count))
            for part in parts
        ]

    def forget_read(self, b: int, sequence: Sequence) -> None:
        """`commit` does, at a segment's end."""

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        """Tokens that nobody has read (a synthetic bank) have not surprised."""
        sequence = self.sequences[0]
        if step is not None:
            held = sequence.layers[self.evicting[0]][0].held if sequence.layers else 0
            scores = self._scores(sequence)
            more = scores.new_zeros(held + length - sequence.since - len(scores))
            self._keep_scores(sequence, torch.cat([scores, more]))
        super().end_prompt(length, step)

    # ---------------------------------------------------------------- a step

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
        """Slots are positions; of a full store the row that is about to go is not seen."""
        budget, held = sequence.budgets[layer] if sequence.budgets else 0, k.shape[1] - 1
        if positions is None or (held == at and at < budget):
            return EvictingRuntime.attend_step(
                self, sequence, layer, q, k, v, positions, at, softmax
            )
        sinks, seen, row = self.method.sink, min(held + 1, budget), positions[0].long()
        slots = ranks(row)
        if held == budget:
            last = row[self._last(sequence, layer, at)]
            slots = torch.where(row > last, slots - 1, slots)
            slots = torch.where(row == last, -1, slots)  # older than anything that is seen
        places = at + 1 - seen + slots
        near = self._turned(k[:, sinks:], (places - row)[sinks:])
        k = torch.cat([key_floats(k[:, :sinks]), near], 1)
        given = slice(sinks, k.shape[1]), at, sinks, seen - sinks, softmax
        return self.attend_window(q, k, v, places, *given)

    def _last(self, sequence: Sequence, layer: int, at: int) -> torch.Tensor:
        """Index [1] of the row that `trim` drops after the step at position `at`."""
        assert sequence.layers is not None
        part = sequence.layers[layer][0].part()
        assert part.scores is not None
        held = part.positions[:1]
        stay = (held < self.method.sink) | (held >= self._newest(sequence, layer, at + 1))
        return worst(part.scores[:1, 0].masked_fill(stay, float("inf")), held)

    def _newest(self, sequence: Sequence, layer: int, length: int) -> int:
        """The first of the newest tokens, which stay; a step's own is one of them."""
        return length - max(1, self.method.parts(sequence.budgets[layer]).recent)

    def trim(self, rows: Rows, budget: int, sequence: Sequence, layer: int) -> Rows:
        """Drop the least surprising token."""
        if rows.held > budget:
            stay = self.method.sink, self._newest(sequence, layer, sequence.length)
            rows.drop_least(self.setup.backend, "max", *stay)
        return rows

    # ---------------------------------------------------------------- going back, copies

    def state(self) -> Any:
        """With the newest token's logits, which score the one behind it."""
        inner = super().state()
        return None if inner is None else (*inner, self.behind)

    def restored(self, state: Any, length: int) -> Any:
        *inner, behind = state
        if behind is not None:
            shape = (self.setup.config.vocab_size,)
            if not (isinstance(behind, torch.Tensor) and behind.shape == shape):
                raise ValueError("logits")
            if behind.dtype != torch.float32:
                raise ValueError("logits")
            behind = behind.to(self.setup.device)
        return *super().restored(tuple(inner), length), behind

    def load(self, state: Any, length: int | None) -> None:
        *inner, self.behind = state
        self.next = self.told = None
        self.turn = False
        super().load(tuple(inner), length)

    def copy_from(self, other: Any, sequence: int = 0) -> None:
        super().copy_from(other, sequence)
        if sequence == 0:
            self.behind, self.turn = other.behind, other.turn


def ranks(positions: torch.Tensor) -> torch.Tensor:
    """How many of positions int64 [n], which differ, are below each."""
    return positions.argsort().argsort()
