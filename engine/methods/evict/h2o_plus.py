"""H2O+: H2O that evicts while it reads, so that a prompt longer than the device holds can be read.

Source: the OmniKV paper, appendix C (its baseline above 60K tokens and 30B parameters). The prompt
is read in segments counted from its beginning; after each, and after the last, every head keeps the
newest and the heaviest of its budget. A segment's queries see what is kept and their own segment.
At no time does a head hold more than budget + segment tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.bank.base import Bank, Step
from engine.base.checks import integer
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.evict.h2o import H2O
from engine.methods.evict.shared.accumulated_scores import AccumulatingRuntime
from engine.methods.evict.shared.store import Part, Rows, Sequence, best, row_bytes
from engine.methods.evict.shared.windows import spread
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs

AUTO = ("auto", "auto_70b")


@dataclass(frozen=True)
class H2OPlus(H2O):
    """segment: tokens, or the published rules for n tokens of prompt: "auto" (128e6 / n^1.05, 20
    above 150,000), "auto_70b" (2e5 / n).
    """

    cut: str = "prefill"
    segment: int | str = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.segment not in AUTO:
            integer("segment", self.segment, 1)
        if self.cut != "prefill":
            raise SettingError(
                f"cut: found {self.cut!r}, expected 'prefill' (h2o_plus cuts while it reads)"
            )

    @property
    def name(self) -> str:
        return "h2o_plus"

    @property
    def own_prefill(self) -> bool:
        return True

    def default_budget(self) -> dict[str, float]:
        return {"share": 0.3}

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        # segments are counted from the prompt's beginning
        return replace(super().needs(plan, config, capacity, itemsize), final_call=None)

    def store_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int
    ) -> int:
        """The stores before and after a chunk, which is committed at its end, and the scores of
        both with a segment.
        """
        rows = len(plan.partial_layers) * (
            min(capacity, self.budget(plan, capacity)) + self.waiting(capacity)
        )
        stores = 2 * self.store_rows(plan, capacity)
        row = row_bytes(config, itemsize, self.scores_of(config))
        return stores * config.num_kv_heads * row + 8 * config.num_heads * rows

    def waiting(self, capacity: int) -> int:
        """A segment that a chunk has begun."""
        return min(capacity, self.segment_of(capacity))

    def segment_of(self, length: int) -> int:
        """Tokens of a segment of a prompt that ends at `length`."""
        if self.segment == "auto":
            return 20 if length > 150_000 else max(1, int(128_000_000 // length**1.05))
        return max(1, 200_000 // length) if self.segment == "auto_70b" else int(self.segment)

    def runtime(self, setup: Setup) -> Runtime:
        return H2OPlusRuntime(self, setup)


@dataclass(frozen=True)
class Progress:
    """Progress of one layer through a segmented prompt: tokens kept (None: none yet), first
    position of the segment, scores [Hkv, G, held + segment].
    """

    rows: Rows | None
    since: int
    scores: torch.Tensor | None


class H2OPlusRuntime(AccumulatingRuntime):
    """Segments of a chunk one after the other, each layer for itself; `pending` holds {layer:
    (Progress, output of the chunk's last query)} until `commit`.
    """

    method: H2OPlus
    layers: dict[int, Progress]  # of the layers that evict

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        """Every layer begins with what it has kept."""
        self.reading, self.total, self.pending, self.start = True, stop, {}, start
        self.budget = self.method.budget(self.plan, stop)
        self.segment = self.method.segment_of(stop)
        sequence, self.layers = self.sequences[0], {}
        for layer in self.evicting:
            rows = sequence.layers[layer][0] if sequence.layers else None
            scores = rows.part().scores if rows else None
            self.layers[layer] = Progress(rows, sequence.since, scores)

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
            new = self.added(0, layer, 0, part[0], k, first, at)
            if progress.scores is not None:
                new[:, :, : progress.scores.shape[2]] += progress.scores
            progress, at = replace(progress, scores=new), end
            if (end - self.start) % self.segment == 0:
                progress = self._cut(layer, progress, k, v, end)
        self.pending[layer] = progress, newest
        return torch.cat(out, 1)

    def _live(self, layer: int, progress: Progress, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [Hkv, T, D]: what is kept, then the segment up to `end`."""
        assert self.bank is not None
        k, v = (t[0] for t in self.bank.rows(layer, progress.since, end))
        if progress.rows is None:
            return k, v
        old_k, old_v = progress.rows.kv()
        return torch.cat([old_k, k], 1), torch.cat([old_v, v], 1)

    def _cut(
        self, layer: int, progress: Progress, k: torch.Tensor, v: torch.Tensor, end: int
    ) -> Progress:
        """What is left of a layer after a segment that ends at `end`."""
        positions = torch.arange(progress.since, end, dtype=torch.int32, device=k.device)
        positions = positions.expand(len(k), -1)
        if progress.rows:
            positions = torch.cat([progress.rows.part().positions, positions], 1)
        scores = k.new_zeros(len(k), self.setup.config.group, k.shape[1], dtype=torch.float32)
        if progress.scores is not None:
            scores[:, :, : progress.scores.shape[2]] = progress.scores
        part = Part(slice(0, self.heads), k, v, positions, scores)
        index = best(self.ranked(part, end, self.budget), positions, self.budget)
        rows = Rows.gather(part, index, self.method.max_rows(self.budget))
        return Progress(rows, end, rows.part().scores)

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
        for layer, progress in self.layers.items():
            if progress.since < length:
                k, v = self._live(layer, progress, length)
                self.layers[layer] = self._cut(layer, progress, k, v, length)
                del k, v
            self.bank.forget(layer, length)
        sequence.read_to(length, self.budgets(length))
        sequence.keep(spread(self.plan, self._rows(), []))
        self.layers = {}

    def _rows(self) -> list[list[Rows]]:
        """The store of each layer that evicts; empty while none has one."""
        return [[progress.rows] for progress in self.layers.values() if progress.rows is not None]
