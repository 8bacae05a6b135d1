"""H2O+: H2O that evicts while it reads, so that a prompt longer than the device holds can be read.

Source: the OmniKV paper, appendix C (its baseline above 60K tokens and 30B parameters). The prompt
is read in segments counted from its beginning; after each, and after the last, every head keeps the
newest and the heaviest of its budget. A segment's queries see what is kept and their own segment.
At no time does a head hold more than budget + segment tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.base.checks import integer
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.evict.h2o import H2O
from engine.methods.evict.segmented.segments import Segmented, SegmentedRuntime
from engine.methods.evict.shared.accumulated_scores import AccumulatingRuntime
from engine.methods.evict.shared.store import Part, Rows, best
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from kernels.native.own_pages import copied

AUTO = ("auto", "auto_70b")


@dataclass(frozen=True)
class H2OPlus(Segmented, H2O):
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

    def default_budget(self) -> dict[str, float]:
        return {"share": 0.3}

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        # segments are counted from the prompt's beginning
        return replace(super().needs(plan, config, capacity, itemsize), final_call=None)

    def noted_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int
    ) -> int:
        """Scores, before and after a chunk."""
        held = min(capacity, self.budget(plan, capacity)) + self.waiting(capacity)
        return 8 * config.num_heads * held

    def segment_of(self, length: int) -> int:
        if self.segment == "auto":
            return 20 if length > 150_000 else max(1, int(128_000_000 // length**1.05))
        return max(1, 200_000 // length) if self.segment == "auto_70b" else int(self.segment)

    def runtime(self, setup: Setup) -> Runtime:
        return H2OPlusRuntime(self, setup)


class H2OPlusRuntime(SegmentedRuntime, AccumulatingRuntime):
    """Notes the scores [Hkv, G, held + segment] of a layer."""

    method: H2OPlus

    def first_note(self, rows: Rows | None) -> torch.Tensor | None:
        return rows.part().scores if rows else None

    def noted(
        self, layer: int, note: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, at: int
    ) -> torch.Tensor:
        new = self.added(0, layer, 0, q, k, k.shape[1] - len(q), at)
        if note is not None:
            new[:, :, : note.shape[2]] += note
        return copied(new)  # it outlives what the segment makes

    def ranked_segment(
        self, layer: int, part: Part, note: torch.Tensor | None, end: int
    ) -> tuple[Part, torch.Tensor]:
        k, budget = part.k, self.budget_of[layer]
        scores = k.new_zeros(len(k), self.setup.config.group, k.shape[1], dtype=torch.float32)
        if note is not None:
            scores[:, :, : note.shape[2]] = note
        part = part._replace(scores=scores)
        return part, best(self.ranked(part, end, budget), part.positions, budget)
