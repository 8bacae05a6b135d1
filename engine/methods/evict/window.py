"""Window attention: the newest tokens and nothing else.

Source: METHODS.md row `window` (Beltagy et al., Longformer, 2020); the sliding window that some
checkpoints are trained with. Default 4096 tokens. It collapses once the first token has left: the
lower bound of every comparison.
"""

from dataclasses import dataclass

from engine.methods.evict.by_position import Windowed


@dataclass(frozen=True)
class Window(Windowed):
    """tokens | share: the newest tokens that are seen, the query's own included."""

    clips = False

    def default_budget(self):
        """The 4K of the PoD paper's comparison."""
        return {"tokens": 4096}

    def plain(self, sinks, window):
        """As long as nothing has left the window."""
        return window

    def far(self, q, k, at, sinks, window, rotary):
        """There are no sinks."""
        return q.new_zeros(k.shape[0], q.shape[2], len(at), 0)
