"""Sliding window with re-computation: every new token encodes the newest w tokens from scratch.

Source: Xiao et al., StreamingLLM (ICLR 2024), section 3.1 and figure 1 (c), its baseline. No K or V
outlives a step, so each answer is full attention's to a text that begins w tokens ago, with
positions from 0: what the methods by position are measured against, and too slow for anything else.
A step costs O(w^2) in attention and w tokens of everything else, where theirs costs one token. A
prompt costs one such step, however long it is. Default: the paper's 1,024 tokens.

What runs is engine/runner/recompute/runner.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.base.checks import integer
from engine.base.newest_tokens import KEPT
from engine.methods.base import Method, Runtime, Setup
from engine.methods.evict.shared.windows import evicting_plan
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs

BLOCK = 64  # rows of which a bank on a GPU has a whole number


@dataclass(frozen=True)
class WindowRecompute(Method):
    """tokens: the newest ones that are encoded again for each new one, itself included."""

    tokens: int = 1024

    named = True

    def __post_init__(self) -> None:
        integer("tokens", self.tokens, 1)

    @property
    def name(self) -> str:
        return "window_recompute"

    @property
    def cannot_draft(self) -> str:
        return "it keeps no rows that full attention could read"

    def plan(self, config: ModelConfig) -> LayerPlan:
        return evicting_plan(self.name, config)

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        rows = min(self.tokens, capacity)
        whole = -(-rows // BLOCK) * BLOCK
        size = whole * len(config.keeping_layers) * config.kv_bytes(itemsize)
        size += whole * len(config.ring_layers) * config.kv_bytes(itemsize, local=True)
        return Needs(
            store_bytes=size,
            store_note=f"K and V of {rows:,} tokens, while a step encodes them",
            retained=rows,
            retained_bytes=size,
            step_rows=0,
            own_prompts=True,
            forgets=True,
            leaves_rows=False,
            sliding=True,
            capped=True,
        )

    def outlook(self, plan: LayerPlan, *facts: Any, **more: Any) -> str:
        return (
            f"{self.name}: every token encodes the newest {self.tokens:,} again, O(w^2) a step and "
            f"about {self.tokens:,} times the work of one with a cache; for comparisons"
        )

    def bounds_distances(self, plan: LayerPlan, positions: int, length: int) -> bool:
        return self.tokens <= positions

    def streamed(self, config: ModelConfig) -> Method:
        if self.tokens > KEPT:
            raise self.no_stream(
                f"encodes {self.tokens:,} tokens again, of which {KEPT:,} are kept"
            )
        return self

    def forgotten(self, length: int) -> str:
        if length <= self.tokens:
            return ""
        return f"from here on the oldest tokens beyond the newest {self.tokens:,} are forgotten"

    def runtime(self, setup: Setup) -> Runtime:
        return RecomputeRuntime(self, setup)


class RecomputeRuntime(Runtime):
    """Nothing: the tokens are the session's."""

    method: WindowRecompute

    def rows_read(self, n: int) -> list[int]:
        """Rows that a step makes anew, and reads."""
        return self.setup.config.rows_seen(min(n, self.method.tokens))

    def state(self) -> Any:
        """Nothing is needed to come back."""
        return (0,)
