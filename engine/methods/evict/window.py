"""Window attention: the newest tokens and nothing else.

Source: Beltagy et al., Longformer (2020); the sliding window that some checkpoints are trained
with. Default 4096 tokens. It collapses once the first token has left: the lower bound of every
comparison.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.methods.evict.shared.by_position import Windowed


@dataclass(frozen=True)
class Window(Windowed):
    """tokens | share: the newest tokens that are seen, the query's own included."""

    @property
    def clips(self) -> bool:
        return False

    def default_budget(self) -> dict[str, int]:
        """The 4K of the PoD paper's comparison."""
        return {"tokens": 4096}

    def clip_from(self, sinks: int, window: int) -> int:
        return window

    def sink_turns(self, at: int, sinks: int, window: int) -> torch.Tensor | None:
        """None, of no sinks."""
        return None
