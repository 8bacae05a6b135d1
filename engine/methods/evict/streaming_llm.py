"""StreamingLLM: the first tokens as attention sinks, and a window; positions are slots of the
cache.

Source: Xiao et al., StreamingLLM (ICLR 2024), section 3.2. K is cached before rotation and a query
at position p sits in slot min(p, s + w - 1), so no distance ever exceeds the cache: the window's
distances are true, a sink in slot i is s + w - 1 - i away from then on. Here K is stored rotated,
and the query is turned to its slot for the sinks alone. Defaults: the code's 4 sinks and a window
of 512. `official` is what the OmniKV paper compares with: 1% of the prompt as sinks, positions as
they were, the prompt read by full attention and trimmed once, everything generated kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.base.checks import boolean
from engine.methods.base import Runtime, Setup
from engine.methods.evict.shared.by_position import (
    Windowed,
    WindowedRuntime,
    slot_logits,
    validate_sink,
)
from engine.methods.evict.shared.runtime import EvictingRuntime
from engine.methods.evict.shared.settings import Evicting
from engine.methods.evict.shared.store import Rows, Sequence
from engine.model.rope import Rotary


@dataclass(frozen=True)
class StreamingLLM(Windowed):
    """tokens | share: sinks and window. sink: first tokens that stay. official: as in the OmniKV
    paper's comparison; sink is then unused.
    """

    sink: int = 4
    official: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        boolean("official", self.official)
        validate_sink(self.sink, None if self.official else self.tokens)

    @property
    def name(self) -> str:
        return "streaming_llm"

    @property
    def own_prefill(self) -> bool:
        """The baseline of the OmniKV paper reads a prompt by full attention."""
        return not self.official

    @property
    def clips(self) -> bool:
        """The official variant keeps true positions."""
        return not self.official

    def default_budget(self) -> dict[str, Any]:
        """4 sinks and a window of 512; the paper's comparison is at Mem 30%."""
        return {"share": 0.3} if self.official else {"tokens": 516}

    def sinks(self, budget: int, length: int) -> int:
        """Fixed, or 1% of the prompt; at least one token of window is left."""
        return min(budget - 1, length // 100 if self.official else self.sink)

    def max_rows(self, budget: int) -> int | None:
        """The paper's comparison never evicts in an answer."""
        return None if self.official else super().max_rows(budget)

    def course(self, budget: int, length: int, generated: int) -> tuple[int, int]:
        if self.official:
            return Evicting.course(self, budget, length, generated)
        return super().course(budget, length, generated)

    def clip_from(self, sinks: int, window: int) -> int:
        """Until the cache is full, slots are positions."""
        return sinks + window

    def sink_logits(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        at: torch.Tensor,
        sinks: int,
        window: int,
        rotary: Rotary,
    ) -> torch.Tensor:
        """The query as if it stood in the last slot."""
        return slot_logits(q, k, at, sinks + window, rotary)

    def sink_turns(self, at: int, sinks: int, window: int) -> torch.Tensor | None:
        return torch.tensor([sinks + window - 1 - at])

    def runtime(self, setup: Setup) -> Runtime:
        return TrimmedOnceRuntime(self, setup) if self.official else WindowedRuntime(self, setup)


class TrimmedOnceRuntime(WindowedRuntime):
    """Full attention to a prompt, one cut at its end, and plain attention to what is left and what
    is generated.
    """

    attend_rows = EvictingRuntime.attend_rows
    attend_step = EvictingRuntime.attend_step
    attend_in_one_call = EvictingRuntime.attend_in_one_call

    def trim(self, rows: Rows, budget: int, sequence: Sequence, layer: int) -> Rows:
        return rows
