"""KVzip: keep what the model looks at when it repeats its context, once for all questions.

Source: Kim et al., KVzip (2025), and its published code. At the end of a prompt the context runs
through the model again, `chunk` tokens at a time behind a request to repeat them; all of what is
held is attended to, and the pass leaves no row. A token's score in a K/V head is the largest weight
that any query of its chunk's pass, of any query head of the group, gives it; softmax is over the
first tokens (the code's system prompt), that chunk and the pass so far. The highest `share` of all
layers and heads stays. A prompt shorter than `least` is a question: it and answers stay, unscored,
and are scored with the next longer prompt; what has a score keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from engine.bank.base import Bank, Step
from engine.base.checks import integer, one_of
from engine.base.errors import SettingError
from engine.methods.base import Encode, Pass, Runtime, Setup
from engine.methods.evict.repeating.repetition import Repeating, Repetition
from engine.methods.evict.repeating.shares import counts_of_best
from engine.methods.evict.shared.runtime import Chooser, EvictingRuntime, everything
from engine.methods.evict.shared.settings import Evicting
from engine.methods.evict.shared.store import Part, Rows, Sequence, best
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from engine.plan.prefill_time import PrefillFlops

FIRST = "\n\nRepeat the previous context exactly."
LATER = "\n\nRepeat the part of the previous context exactly, starting with "
LAST = 8  # tokens of the chunk before that a later request names
REQUEST = len(LATER) + LAST + 1  # tokens of a request, at most: one a letter


@dataclass(frozen=True)
class KVzip(Evicting):
    """across: over which heads scores are ranked: "all" | "layer" | "head" (each keeps as many).
    chunk: tokens that one pass repeats. sink: first tokens, which stay and are not repeated.
    least: tokens of a later prompt from which on it is scored.
    """

    full_prompts = True
    scored = True

    across: str = "all"
    chunk: int = 2048
    sink: int = 4
    least: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("across", self.across, ("all", "layer", "head"))
        integer("chunk", self.chunk, 1)
        integer("sink", self.sink, 0)
        integer("least", self.least, 1)
        if self.tokens is not None and self.tokens < self.sink:
            raise SettingError(
                f"tokens: found {self.tokens}, expected at least the sink of {self.sink} tokens"
            )

    def default_budget(self) -> dict[str, float]:
        return {"share": 0.3}

    def budget(self, plan: LayerPlan, length: int) -> int:
        """At least the sink."""
        return max(self.sink, super().budget(plan, length))

    def scores_of(self, config: ModelConfig) -> int:
        """One: of a group the maximum."""
        return 1

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        needs = super().needs(plan, config, capacity, itemsize)
        # every pass reads all that is held
        again = min(capacity, self.chunk) + REQUEST
        return replace(needs, offload=(), again=again, sliding=False, capped=False)

    def store_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int
    ) -> int:
        """The store, and twice the scores of a whole prompt."""
        scores = 8 * plan.num_layers * config.num_kv_heads * capacity
        return super().store_bytes(plan, config, itemsize, capacity) + scores

    def runtime(self, setup: Setup) -> Runtime:
        return KVzipRuntime(self, setup)


class KVzipRuntime(EvictingRuntime):
    """One session's stores, with a number of tokens per K/V head. A score of 0 is of a token that
    nobody has scored yet.
    """

    method: KVzip

    def __init__(self, method: KVzip, setup: Setup):
        super().__init__(method, setup)
        # what the passes of the prompt under way found, and the tokens of each layer's heads
        self.found: Repetition | None = None
        self.counts: list[list[int]] | None = None

    # ---------------------------------------------------------------- the passes

    def passes(self, bank: Bank, begin: int, ids: Ids[int], encode: Encode) -> list[Pass]:
        """Repeat what has no score, where the prompt from `begin` on is no question."""
        self.found, length = None, len(ids)
        first, held = self._first(begin, length), self.sequences[0].layers is not None
        if first >= length:
            return []
        found, size = [], self.method.chunk
        layers, device = self.plan.num_layers, self.setup.device
        self.found = Repetition(layers, self.heads, first, length, device)
        for at in range(first, length, size):
            whole = at == first and not held
            request = encode(FIRST) if whole else [*encode(LATER), *ids[max(0, at - LAST) : at]]
            stop = min(length, at + size)
            one = Repeating(self, bank, self.found, self.method.sink, at, stop)
            found.append(Pass([*request, *ids[at:stop]], one))
        return found

    def passes_flops(self, flops: PrefillFlops, begin: int, stop: int) -> tuple[float, float]:
        first, sequence = self._first(begin, stop), self.sequences[0]
        count = max(0, stop - first)
        held = self.rows_read(stop)[0] if sequence.layers is not None else 0
        seen = held + stop - sequence.since + self.method.chunk / 2
        times = 1 + REQUEST / self.method.chunk
        return flops.per_token * count * times, flops.layers * flops.per_pair * count * times * seen

    def _first(self, begin: int, length: int) -> int:
        """The first position without a score, behind the sink; `length` after a question."""
        sequence = self.sequences[0]
        if sequence.layers is None:
            return self.method.sink
        if length - begin < self.method.least:
            return length
        rows = sequence.layers[0][0].part()
        assert rows.scores is not None
        new = rows.positions[0, rows.scores[0, 0] == 0]
        return max(self.method.sink, int(new.min()) if len(new) else sequence.since)

    # ---------------------------------------------------------------- the cut

    def layer_budgets(self, length: int, step: Step) -> list[int]:
        """Tokens of a head, mean over those of a layer."""
        sequence = self.sequences[0]
        sequence.keep_sums(self._scores(sequence))
        assert sequence.sums is not None
        if self.found is None:
            counts = [(t[:, 0] >= 0).sum(1).tolist() for t in sequence.sums]
        else:
            counts = self._counts(
                [t[:, 0] for t in sequence.sums], self.method.budget(self.plan, length)
            )
            self.counts = counts
        return [sum(heads) // len(heads) for heads in counts]

    def _counts(self, scores: list[torch.Tensor], budget: int) -> list[list[int]]:
        """Tokens of each layer's heads by their scores [Hkv, T]; of a mean of `budget`."""
        layers, heads = self.plan.num_layers, self.heads
        if self.method.across == "all":
            return counts_of_best(scores, layers * heads * budget)
        if self.method.across == "layer":
            return [counts_of_best([t], heads * budget)[0] for t in scores]
        return [(t >= 0).sum(1).clamp(max=budget).tolist() for t in scores]

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        """Of tokens that no pass has repeated (a synthetic bank) all stay."""
        super().end_prompt(length, step)
        self.found = self.counts = None

    def fold(self, b: int, step: Step | None, choose: Chooser | None) -> None:
        """Every token takes its score along."""
        sequence = self.sequences[b]
        if sequence.sums is None:
            sequence.keep_sums(self._scores(sequence))
        super().fold(b, step, choose)

    def choose(
        self, sequence: Sequence, layer: int, parts: list[Part], step: Step | None
    ) -> list[tuple[Part, torch.Tensor]]:
        """As many of each head's highest scores as it was given."""
        if self.counts is None:
            return [(part, everything(part)) for part in parts]
        chosen = []
        for part in parts:
            assert part.scores is not None
            counts, scores = self.counts[layer][part.heads], part.scores[:, 0]
            if len(set(counts)) == 1:
                chosen.append((part, best(scores, part.positions, counts[0])))
                continue
            for i, count in enumerate(counts):
                one = part.head(i)
                chosen.append((one, best(scores[i : i + 1], one.positions, count)))
        return chosen

    def _scores(self, sequence: Sequence) -> list[torch.Tensor]:
        """Scores [Hkv, 1, T] of everything that each layer attends to, the new ones too: infinite
        in the sink, 0 where there is none yet, -1 behind the tokens of a head with fewer.
        """
        found = []
        for layer in range(self.plan.num_layers):
            stored: list[Rows | None] = [None]
            if sequence.layers is not None:
                stored = [*sequence.layers[layer]]
            parts = [
                self._part_scores(sequence, layer, number, rows)
                for number, rows in enumerate(stored)
            ]
            widest = max(part.shape[1] for part in parts)
            padded = [functional.pad(t, (0, widest - t.shape[1]), value=-1.0) for t in parts]
            found.append(torch.cat(padded).unsqueeze(1))
        return found

    def _part_scores(
        self, sequence: Sequence, layer: int, number: int, rows: Rows | None
    ) -> torch.Tensor:
        """Scores [h, T] of one part, which has `rows` of the store."""
        heads, held = slice(0, self.heads), 0
        if rows is not None:
            heads, held = rows.heads, rows.held
        device = self.setup.device
        count = heads.stop - heads.start
        positions = sequence.positions(layer, number, held, count, device)
        scores = torch.zeros(positions.shape, device=device)
        if rows is not None and rows.scores is not None:
            scores[:, :held] = rows.scores[:, 0, :held]
        if self.found is not None:
            at = positions.long() - self.found.first
            new = self.found.maxima[layer][heads].gather(1, at.clamp(min=0))
            scores = torch.where(at >= 0, new, scores)
        return scores.masked_fill(positions < self.method.sink, float("inf"))
