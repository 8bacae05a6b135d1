"""OmniKV(official=True): the published research code's behaviour, to the last selected index, for
comparison number by number.

Differences from the engine's own OmniKV: only prompt tokens are scored, every generated token is
tail; softmax runs over the scored tokens only; a window's queries are all rotated to the current
position; prompt tokens inside the window are not scored but always selected and count against the
budget; a second prefill is refused. Plain torch, no CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.bank.base import Step
from engine.methods.base import Setup, device_int
from engine.methods.omnikv.runtime import OmniKVRuntime
from engine.methods.omnikv.settings import Settings
from engine.model.rope import apply_rope
from engine.plan.layers import Role
from kernels.rows.forms import unpack_keys


class OfficialRuntime(OmniKVRuntime):
    """Selection state of one session with one prompt."""

    def __init__(self, method: Settings, setup: Setup):
        super().__init__(method, setup)
        self.prompt = 0  # tokens

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        super().end_prompt(length, step)
        self.prompt = length

    def tail_start(self, step: Step) -> torch.Tensor:
        """Everything generated is tail."""
        return device_int(self.prompt, self.setup)

    def attend_and_select(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Selection from the prompt's tokens, then attention to everything."""
        group = self._group(layer)
        forced = self._forced(step.lengths[0])
        scored = self.prompt - forced
        index, counts = self.index[group], self.counts[group]
        self.choose_of_all(
            self._prompt_scores(layer, q, step, scored),
            self.zero,
            device_int(scored, self.setup),
            device_int(self._ranked(forced), self.setup),
            index[:, 0],
            counts,
            scratch=self.setup.scratch,
            backend=self.setup.backend,
        )
        if forced:
            kept = int(counts[0])
            index[:, 0, kept : kept + forced] = torch.arange(
                scored, self.prompt, device=index.device, dtype=index.dtype
            )
            counts += forced
        return self.attend_dense(layer, q, step)

    def _forced(self, n: int) -> int:
        """Prompt tokens inside the window at n tokens: selected unscored."""
        return max(0, self.window - (n - self.prompt))

    def _ranked(self, forced: int) -> int:
        """Tokens chosen by score: a window chooses at least one, `last` may choose none."""
        return max(1, self.k - forced) if self.window else self.k

    def _prompt_scores(self, layer: int, q: torch.Tensor, step: Step, scored: int) -> torch.Tensor:
        """Scores of prompt tokens 0 .. scored-1: float32 [B, scored]."""
        k, _ = step.bank.kv(layer)
        rows = unpack_keys(k[:, :, :scored], q.dtype)
        if self.window:
            at = step.positions[:, -1:] + torch.arange(1 - self.window, 1, device=q.device)
            # all at the current position
            turns = step.rotary.at(step.positions[:, -1:].expand(-1, self.window), layer=layer)
            q = apply_rope(step.query_ring.read(layer, at.clamp_(min=0)), *turns)
        batch, queries, heads, dim = q.shape
        folded = q.view(batch, queries, rows.shape[1], -1, dim).permute(0, 2, 1, 3, 4).flatten(2, 3)
        logits = (folded @ rows.transpose(2, 3)).float() * self.scale
        logits = logits.view(batch, rows.shape[1], queries, heads // rows.shape[1], scored)
        logits = logits.transpose(1, 2).flatten(2, 3)
        if self.method.kind == "softmax":
            logits = torch.softmax(logits, dim=-1)
        return (logits.amax(dim=2) * self.alpha.view(1, -1, 1)).sum(1).contiguous()

    def selection_scores(self) -> dict[int, torch.Tensor]:
        """Empty: each filter layer scores in a temporary tensor."""
        return {}

    def rows_read(self, n: int) -> list[int]:
        """Chosen tokens, the window's forced ones included, and everything generated."""
        forced = self._forced(n)
        chosen = min(self._ranked(forced), self.prompt - forced) + forced
        sparse = chosen + n - self.prompt
        return [sparse if role is Role.SPARSE else n for role in self.plan.roles]

    def state(self) -> Any:
        return self.k, self.prompt

    def load(self, state: Any, length: int | None) -> None:
        k, self.prompt = state
        self._set_k(k)

    def truncate(self, length: int) -> None:
        """An emptied session may read another prompt."""
        super().truncate(length)
        if length == 0:
            self.prompt = 0
