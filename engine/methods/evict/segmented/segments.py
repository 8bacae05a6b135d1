"""Prompts that are cut while they are read, segment by segment, so that one longer than the device
holds can be read.

Segments are counted from a prompt's own beginning, inside each layer, so that the engine's chunks
change nothing. A segment's queries see what is kept and their own segment; after each, and after
the last, every head keeps its budget. At no time does a head hold more than budget + segment
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.bank.base import Bank, Step
from engine.methods.evict.shared.runtime import EvictingRuntime
from engine.methods.evict.shared.settings import Evicting
from engine.methods.evict.shared.store import Part, Rows, Sequence, row_bytes
from engine.methods.evict.shared.windows import spread
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan


@dataclass(frozen=True)
class Segmented(Evicting):
    """Settings of methods that read prompts so."""

    named = False

    @property
    def own_prefill(self) -> bool:
        return True

    def store_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int
    ) -> int:
        """The stores before and after a chunk, which is committed at its end, or the one that an
        answer has made larger; and what is noted of both with a segment.
        """
        stores = max(2 * self.rows_reserved(plan, capacity), self.store_rows(plan, capacity))
        row = row_bytes(config, itemsize, self.scores_of(config))
        noted = len(plan.partial_layers) * self.noted_bytes(plan, config, itemsize, capacity)
        return stores * config.num_kv_heads * row + noted

    def waiting(self, capacity: int) -> int:
        """A segment that a chunk has begun."""
        return min(capacity, self.segment_of(capacity))

    def segment_of(self, length: int) -> int:
        """Tokens of a segment of a prompt that ends at `length`."""
        raise NotImplementedError

    def noted_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int
    ) -> int:
        """Bytes that are noted in one layer while a prompt is read."""
        raise NotImplementedError


@dataclass(frozen=True)
class Progress:
    """Progress of one layer through a segmented prompt: tokens kept (None: none yet), first
    position of the segment, and what the method has noted of the queries.
    """

    rows: Rows | None
    since: int
    note: torch.Tensor | None


class SegmentedRuntime(EvictingRuntime):
    """Segments of a chunk one after the other, each layer for itself; `pending` holds {layer:
    (Progress, output of the chunk's last query)} until `commit`.
    """

    method: Segmented
    layers: dict[int, Progress]  # of the layers that evict
    budget_of: list[int]  # of each layer, at the end of the prompt under way
    last: Step | None = None  # at a prompt's end, the newest token's

    # ---------------------------------------------------------------- what a method says

    def first_note(self, rows: Rows | None) -> torch.Tensor | None:
        """What is noted where a prompt begins, or a segment behind a cut, over a store."""
        return None

    def noted(
        self, layer: int, note: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, at: int
    ) -> torch.Tensor:
        """The note with queries q [C, H, D] at positions from `at` on, which have seen k [Hkv, T,
        D], each up to its own row, the last of which are its chunk's.
        """
        raise NotImplementedError

    def ranked_segment(
        self, layer: int, part: Part, note: torch.Tensor | None, end: int
    ) -> tuple[Part, torch.Tensor]:
        """The part, with the scores that its store keeps, and the index [h, n] of what stays after
        a segment that ends at `end`.
        """
        raise NotImplementedError

    # ---------------------------------------------------------------- a prompt

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        """Every layer begins with what it has kept."""
        self.reading, self.total, self.pending, self.start = True, stop, {}, start
        self.budget_of = spread(self.plan, self.method.budgets(self.plan, stop), 0)
        self.segment = self.method.segment_of(stop)
        sequence, self.layers = self.sequences[0], {}
        for layer in self.evicting:
            rows = sequence.layers[layer][0] if sequence.layers else None
            self.layers[layer] = Progress(rows, sequence.since, self.first_note(rows))

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        """A chunk, cut at the ends of segments."""
        self.bank = bank
        # the last query once more, for its output: it was answered before the cut
        if layer in self.pending:
            return self.pending[layer][1]
        progress, out, at, stop = self.layers[layer], [], start, start + q.shape[1]
        while at < stop:
            end = min(stop, self.start + ((at - self.start) // self.segment + 1) * self.segment)
            k, v = self._live(layer, progress, end)
            first, part = k.shape[1] - (end - at), q[:, at - start : end - start]
            softmax = self.softmax[layer]
            out.append(self.attend_rows(layer, part, k, v, first, at, softmax))
            last = k.shape[1] - 1, end - 1, softmax
            newest = self.attend_rows(layer, part[:, -1:], k, v, *last)
            note = self.noted(layer, progress.note, part[0], k, at)
            progress, at = replace(progress, note=note), end
            if (end - self.start) % self.segment == 0:
                progress = self._cut(layer, progress, k, v, end)
        self.pending[layer] = progress, newest
        return torch.cat(out, 1)

    def _live(self, layer: int, progress: Progress, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [Hkv, T, D]: what is kept, then the segment up to `end`; until the next call."""
        assert self.bank is not None
        k, v = (t[0] for t in self.bank.rows(layer, progress.since, end))
        if progress.rows is None:
            return k, v
        return self.joined([(progress.rows, k, v)])[0]

    def _cut(
        self, layer: int, progress: Progress, k: torch.Tensor, v: torch.Tensor, end: int
    ) -> Progress:
        """What is left of a layer after a segment that ends at `end`."""
        positions = torch.arange(progress.since, end, dtype=torch.int32, device=k.device)
        positions = positions.expand(len(k), -1)
        if progress.rows:
            positions = torch.cat([progress.rows.part().positions, positions], 1)
        part = Part(slice(0, self.heads), k, v, positions, None)
        part, index = self.ranked_segment(layer, part, progress.note, end)
        rows = Rows.gather(part, index, self.method.max_rows(self.budget_of[layer]))
        return Progress(rows, end, self.first_note(rows))

    def add_scores(self, b: int, sequence: Sequence, count: int) -> None:
        if not self.reading:
            super().add_scores(b, sequence, count)
            return
        for layer, (progress, _) in self.pending.items():
            self.layers[layer] = progress

    def forget_read(self, b: int, sequence: Sequence) -> None:
        """All but a segment that has begun; and the store of before this prompt."""
        assert self.bank is not None
        rows = self._rows()
        if rows:
            sequence.keep_read(spread(self.plan, rows, []), self.layers[self.evicting[0]].since)
        for layer, progress in self.layers.items():
            self.bank.forget(layer, progress.since)

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        """Cut the last segment, whole or not."""
        if step is None:
            return
        if not self.reading:
            self.begin_prompt(self.sequences[0].length, length)
        self.reading, self.bank, sequence = False, step.bank, self.sequences[0]
        sequence.read_to(length, self.budgets(length))
        self.last = step
        for layer, progress in self.layers.items():
            if progress.since < length:
                k, v = self._live(layer, progress, length)
                self.layers[layer] = self._cut(layer, progress, k, v, length)
                del k, v
            self.bank.forget(layer, length)
        sequence.keep(spread(self.plan, self._rows(), []))
        self.layers, self.last = {}, None
        self.joins.drop()

    def _rows(self) -> list[list[Rows]]:
        """The store of each layer that evicts; empty while none has one."""
        return [[progress.rows] for progress in self.layers.values() if progress.rows is not None]
