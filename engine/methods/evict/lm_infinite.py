"""LM-Infinite: a lambda-shaped mask, the first tokens and a window, with distances clipped at the
window's length.

Source: Han et al., LM-Infinite (2023). Tokens keep their true positions; a starting token that is
further away than L_pre (the window) is seen at distance L_pre, all of them alike. Defaults: the
code's example for Llama, 10 starting tokens and a window of 4096.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.methods.evict.shared.by_position import Windowed, validate_sink
from engine.model.rope import Rotary


@dataclass(frozen=True)
class LMInfinite(Windowed):
    """tokens | share: starting tokens and window. sink: starting tokens."""

    sink: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        validate_sink(self.sink, self.tokens)

    @property
    def name(self) -> str:
        return "lm_infinite"

    def default_budget(self) -> dict[str, int]:
        """10 starting tokens and a window of 4096."""
        return {"tokens": 4106}

    def sinks(self, budget: int, length: int) -> int:
        """Fixed; at least one token of window is left."""
        return min(budget - 1, self.sink)

    def clip_from(self, sinks: int, window: int) -> int:
        """A distance of L_pre itself is not clipped."""
        return window + min(1, sinks)

    def sink_logits(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        at: torch.Tensor,
        sinks: int,
        window: int,
        rotary: Rotary,
    ) -> torch.Tensor:
        """Beyond L_pre, K as if at 0 and the query as if at L_pre; nearer ones as they are."""
        near = torch.einsum("chgd,hsd->hgcs", q, k)
        first = torch.arange(k.shape[1], device=k.device)
        still = rotary.rotate_by(k.transpose(0, 1), -first).transpose(0, 1)
        moved = rotary.rotate_by(q.flatten(1, 2), window - at).view(q.shape)
        far = torch.einsum("chgd,hsd->hgcs", moved, still)
        return torch.where(at.unsqueeze(1) - first > window, far, near)

    def sink_turns(self, at: int, sinks: int, window: int) -> torch.Tensor | None:
        """As far from each K as L_pre is from 0; not at all where it is no further away."""
        first = torch.arange(sinks)
        return torch.where(at - first > window, first + (window - at), 0)
