"""LM-Infinite: a lambda-shaped mask, the first tokens and a window, with distances clipped at the
window's length.

Source: Han et al., LM-Infinite (2023); METHODS.md row `lm_infinite`. Tokens keep their true
positions; a starting token that is further away than L_pre (the window) is seen at distance L_pre,
all of them alike. Defaults: the code's example for Llama, 10 starting tokens and a window of 4096.
"""

from dataclasses import dataclass

import torch

from engine.methods.evict.by_position import Windowed, checked_sink


@dataclass(frozen=True)
class LMInfinite(Windowed):
    """tokens | share: starting tokens and window. sink: starting tokens."""

    sink: int = 10

    def __post_init__(self):
        super().__post_init__()
        checked_sink(self.sink, self.tokens)

    @property
    def name(self):
        """Name on the command line and in tables."""
        return "lm_infinite"

    def default_budget(self):
        """10 starting tokens and a window of 4096."""
        return {"tokens": 4106}

    def sinks(self, budget, length):
        """Fixed; a window of one token is left."""
        return min(budget - 1, self.sink)

    def plain(self, sinks, window):
        """A distance of L_pre is still its own."""
        return window + min(1, sinks)

    def far(self, q, k, at, sinks, window, rotary):
        """Beyond L_pre, keys as if at 0 and the query as if at L_pre; nearer ones as they are."""
        near = torch.einsum("chgd,hsd->hgcs", q, k)
        first = torch.arange(k.shape[1], device=k.device)
        still = rotary.rotate_by(k.transpose(0, 1), -first).transpose(0, 1)
        moved = rotary.rotate_by(q.flatten(1, 2), window - at).view(q.shape)
        return torch.where(
            at.unsqueeze(1) - first > window, torch.einsum("chgd,hsd->hgcs", moved, still), near
        )
