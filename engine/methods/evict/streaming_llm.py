"""StreamingLLM: the first tokens as attention sinks, and a window; positions are slots of the
cache.

Source: Xiao et al., StreamingLLM (ICLR 2024), section 3.2; METHODS.md row `streaming_llm` and item
29. Keys are cached before rotation and a query at position p sits in slot min(p, s + w - 1), so no
distance ever exceeds the cache: the window's distances are true, a sink in slot i is s + w - 1 - i
away from then on. Here keys are stored rotated, and the query is turned to its slot for the sinks
alone. Defaults: the code's 4 sinks and a window of 512. `official` is what the OmniKV paper
compares with: 1% of the prompt as sinks, positions as they were, the prompt read by full attention
and trimmed once, everything generated kept.
"""

from dataclasses import dataclass

import torch

from engine.errors import SettingError
from engine.methods.evict.base import Evicting
from engine.methods.evict.by_position import Windowed, WindowedRuntime, checked_sink


@dataclass(frozen=True)
class StreamingLLM(Windowed):
    """tokens | share: sinks and window. sink: first tokens that stay. official: as in the OmniKV
    paper's comparison, sink then unused.
    """

    sink: int = 4
    official: bool = False

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.official, bool):
            raise SettingError(f"official: found {self.official!r}, expected True or False")
        checked_sink(self.sink, None if self.official else self.tokens)

    @property
    def name(self):
        """Name on the command line and in tables."""
        return "streaming_llm"

    @property
    def own_prefill(self):
        """The baseline of the OmniKV paper reads a prompt by full attention."""
        return not self.official

    @property
    def clips(self):
        """So it does distances."""
        return not self.official

    def default_budget(self):
        """4 sinks and a window of 512; the paper's comparison is at Mem 30%."""
        return {"share": 0.3} if self.official else {"tokens": 516}

    def sinks(self, budget, length):
        """Fixed, or 1% of the prompt; a window of one token is left."""
        return min(budget - 1, length // 100 if self.official else self.sink)

    def most(self, budget):
        """The paper's comparison never evicts in an answer."""
        return None if self.official else super().most(budget)

    def course(self, budget, length, generated):
        """(base, held)."""
        return (
            Evicting.course(self, budget, length, generated)
            if self.official
            else super().course(budget, length, generated)
        )

    def plain(self, sinks, window):
        """Until the cache is full slots are positions."""
        return sinks + window

    def far(self, q, k, at, sinks, window, rotary):
        """The query as if it stood in the last slot."""
        turned = rotary.rotate_by(q.flatten(1, 2), sinks + window - 1 - at).view(q.shape)
        return torch.einsum("chgd,hsd->hgcs", turned, k)

    def runtime(self, setup):
        """The store of one session."""
        return OfficialRuntime(self, setup) if self.official else WindowedRuntime(self, setup)


class OfficialRuntime(WindowedRuntime):
    """Full attention to a prompt, one cut at its end, and plain attention to what is left and what
    is generated.
    """

    def attend_rows(self, layer, q, k, v, first, start):
        """Everything that is held, as it is."""
        return super(WindowedRuntime, self).attend_rows(layer, q, k, v, first, start)

    def attend_step(self, sequence, layer, q, k, v, positions, at):
        """Everything that is held, as it is."""
        return super(WindowedRuntime, self).attend_step(sequence, layer, q, k, v, positions, at)

    def trim(self, rows, budget, sequence):
        """Nothing goes."""
        return rows
