"""Full attention and OmniKV over rows that lie on several ranks, each of its own tokens."""

from __future__ import annotations

from typing import Any

import torch

from engine.bank.base import Bank, Step
from engine.bank.split.context_bank import ContextBank
from engine.methods.base import Method, Runtime, Setup
from engine.methods.full import Full
from engine.methods.omnikv.method import OmniKV
from engine.methods.omnikv.runtime import OmniKVRuntime
from engine.methods.omnikv.settings import Settings
from engine.methods.split.context_attention import (
    candidates,
    dense_part,
    merged,
    natively,
    prompt_attention,
    score,
    sparse_part,
    winners,
)
from kernels.select.topk import select_topk


def context_runtime(method: Method, setup: Setup) -> Runtime:
    """The runtime of a method that runs over rows of several ranks (`why_not_dealt`)."""
    assert not why_not_dealt(method), "a method that reads rows by position"
    return (
        ContextOmniKV(method, setup) if isinstance(method, Settings) else Everything(method, setup)
    )


def why_not_dealt(method: Method) -> str:
    """Why a method cannot run where each rank holds the rows of its own tokens; "" where it can."""
    if type(method) is Full:
        return ""
    if type(method) is not OmniKV:
        return "has not been built over tokens that lie on several ranks; use full or omnikv"
    if method.official:
        return "follows the published code, which knows one bank; leave official out"
    if method.selector != "last":
        return "scores by several queries, which are ranked by one; use selector='last'"
    if method.prefill_ratio is not None or method.dense_layers != "dense":
        return "chooses for prompts by rows of all; leave prefill_ratio and dense_layers out"
    if method.residual != "none":
        return "draws from what is not chosen, of all tokens together; leave residual out"
    return ""


class Everything(Runtime):
    """Attention to everything, which the ranks bring part by part."""

    def __init__(self, method: Method, setup: Setup) -> None:
        super().__init__(method, setup)
        share, gathered = setup.config.context, setup.gathered
        assert share is not None and gathered is not None
        self.share, self.gathered = share, gathered

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        given = start, self.share, self.gathered, self.scale, self.softmax[layer]
        return prompt_attention(q, _rows(bank, layer), *given, self.setup.backend)

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        step.bank.landed(layer, step)
        return super().attend(layer, q, step)

    def attend_dense(
        self,
        layer: int,
        q: torch.Tensor,
        step: Step,
        scores: torch.Tensor | None = None,
        kind: str = "softmax",
        ranked: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As Runtime.attend_dense; scores [1, T] are of this rank's rows, in their order."""
        rows, n = _rows(step.bank, layer), self.share.count(step.lengths[0])
        scratch, backend = self.setup.scratch, self.setup.backend
        given = self.scale, self.softmax[layer], scratch, backend, scores is not None
        part, logits = dense_part(q, rows, n, *given)
        out, lse = merged(part, self.gathered, q.dtype)
        if scores is not None and logits is not None:
            shares = lse[0, 0] if kind == "softmax" else None
            score(logits, shares, scores[0, :n], natively(q, *rows, backend))
        return out


class ContextOmniKV(Everything, OmniKVRuntime):
    """OmniKV whose ranks choose what one process would, and attend each to its part of it. `index`
    has positions, as of one process; `scores` are of own rows.
    """

    method: Settings

    def __init__(self, method: Method, setup: Setup) -> None:
        super().__init__(method, setup)
        # this rank's rows of each group's selection
        self._own = [group[0, 0, :0] for group in self.index]
        self._list = torch.empty_like(self.index[0][:, 0]) if self.index else self._none[None]
        self._listed = torch.zeros_like(self.k_device)
        self._won = self.scores.new_empty(0)

    def attend_and_select(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        out = self.attend_dense(layer, q, step, self.scores, self.method.kind)
        if self.method.sink:
            self.scores[:, : self.share.count(self.method.sink)] = float("inf")
        self.choose(self._group(layer), self.scores, step)
        return out

    def choose(self, group: int, scores: torch.Tensor, step: Step, counted: bool = False) -> None:
        """Select the group's tokens among all ranks' candidates, and note this rank's of them."""
        before = torch.full_like(self._listed, self._tail(step))
        given = self.zero, before, self.k_device, self._list, self._listed
        select_topk(scores, *given, self.setup.scratch, self.setup.backend)
        lists = self.gathered(candidates(scores[0], self._list[0], self.share))
        index, counts = self.index[group][:, 0], self.counts[group]
        self._won = winners(lists, self.k_device, index, counts)
        self._own[group] = self.share.rows_of(index[0, : int(counts)]).contiguous()

    def _tail(self, step: Step) -> int:
        """This rank's first row of the tail."""
        tail = self.method.tail
        return step.once("own tail", lambda: self.share.count(int(step.tail_start(tail))))

    def _over(
        self, layer: int, group: int, q: torch.Tensor, step: Step, tail_start: torch.Tensor
    ) -> torch.Tensor:
        rows, n = _rows(step.bank, layer), self.share.count(step.lengths[0])
        given = self.scale, self.softmax[layer], self.setup.scratch, self.setup.backend
        part = sparse_part(q, rows, self._own[group], self._tail(step), n, *given)
        return merged(part, self.gathered, q.dtype)[0]

    def selection_scores(self) -> dict[int, torch.Tensor]:
        """As OmniKVRuntime: of the last group, whose scores the ranks have told each other."""
        chosen = self.selections()
        if not chosen:
            return {}
        scores = torch.softmax(self._won, 0) if self.method.kind == "raw" else self._won
        return {max(chosen): scores.nan_to_num(0.0, posinf=0.0).cpu()}

    def choice(self) -> Any:
        return super().choice(), [rows.clone() for rows in self._own], self._won.clone()

    def load_choice(self, choice: Any) -> None:
        inner, self._own, self._won = choice
        super().load_choice(inner)


def _rows(bank: Bank, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer, of this rank's tokens."""
    assert isinstance(bank, ContextBank), "a bank that is not split by context"
    return bank.own_rows(layer)
