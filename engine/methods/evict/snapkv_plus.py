"""SnapKV that evicts while it reads, so that a prompt longer than the device holds can be read.

Source: this project's, after SnapKV (Li et al., NeurIPS 2024) and H2O+ (the OmniKV paper, appendix
C). A prompt is read in segments; after each, every head keeps what the segment's last queries look
at, and those queries' own window, of what it held and the segment. It is what SnapKV makes of the
same text as so many prompts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.base.checks import integer
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.evict.segmented.segments import Segmented, SegmentedRuntime
from engine.methods.evict.shared.store import Part, best
from engine.methods.evict.snapkv import SnapKV, SnapRuntime
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs


@dataclass(frozen=True)
class SnapKVPlus(Segmented, SnapKV):
    """segment: tokens of a prompt between two cuts, at least the window."""

    full_prompts = False

    segment: int = 2048

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("segment", self.segment, 1)
        if self.segment < self.window:
            raise SettingError(
                f"segment: found {self.segment}, expected at least the window of {self.window} "
                "tokens"
            )

    @property
    def name(self) -> str:
        return "snapkv_plus"

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        # segments are counted from the prompt's beginning, and end anywhere: in the last layer too
        # the queries that choose are wanted
        found = super().needs(plan, config, capacity, itemsize)
        return replace(found, final_call=None, every_query=True)

    def noted_bytes(
        self, plan: LayerPlan, config: ModelConfig, itemsize: int, capacity: int
    ) -> int:
        """The newest queries, before and after a chunk."""
        return 2 * min(self.window, capacity) * config.num_heads * config.head_dim * itemsize

    def segment_of(self, length: int) -> int:
        return self.segment

    def runtime(self, setup: Setup) -> Runtime:
        return SnapPlusRuntime(self, setup)


class SnapPlusRuntime(SegmentedRuntime, SnapRuntime):
    """Notes the newest queries [window, H, D] of a layer's segment."""

    method: SnapKVPlus

    def noted(
        self, layer: int, note: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, at: int
    ) -> torch.Tensor:
        window = self.method.window
        if note is None or len(q) >= window:
            return q[-window:].clone()
        return torch.cat([note, q])[-window:]

    def ranked_segment(
        self, layer: int, part: Part, note: torch.Tensor | None, end: int
    ) -> tuple[Part, torch.Tensor]:
        if note is None:  # tokens that another method has read, or nobody
            assert self.last is not None, "a segment has queries"
            window = min(self.method.window, end)
            note = self.newest_queries(self.sequences[0], layer, part.heads, window, self.last)
        scores = self.scored(layer, part, note)
        return part, best(scores, part.positions, self.budget_of[layer])
