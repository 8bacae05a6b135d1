"""The bounds of choosing over rows that lie on several ranks, with one list a layer."""

from __future__ import annotations

import torch

from engine.bank.base import Step
from engine.bank.split.context_bank import ContextBank
from engine.methods.oracle.random_topk import RandomTopKRuntime
from engine.methods.oracle.runtime import GranularRuntime
from engine.methods.oracle.topk import OracleRuntime
from engine.methods.select.base import Selection
from engine.methods.split.context_attention import own_logits
from engine.methods.split.context_runtime import Everything


class ContextGranular(Everything, GranularRuntime):
    """Each rank attends to its part of a layer's list and of the tail."""

    def attend_kept(
        self, layer: int, q: torch.Tensor, step: Step, tail_start: torch.Tensor
    ) -> torch.Tensor:
        step.bank.landed(layer, step)
        return super().attend_kept(layer, q, step, tail_start)

    def attend_selection(
        self, layer: int, q: torch.Tensor, step: Step, chosen: Selection
    ) -> torch.Tensor:
        assert isinstance(step.bank, ContextBank) and chosen.index is not None
        assert chosen.counts is not None
        tail = torch.full_like(chosen.tail_start, self.share.count(int(chosen.tail_start)))
        part = step.bank.part_of(chosen.index, chosen.counts)
        return self.over(layer, q, step.bank.own.picked(layer, *part, tail, self.own_step(step)))


class ContextRandomTopK(ContextGranular, RandomTopKRuntime):
    """Every rank draws the same tokens, with nothing sent for it."""


class ContextOracle(ContextGranular, OracleRuntime):
    """The ranks tell each other the log-sum-exp of their rows, and then their best tokens."""

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        step.bank.landed(layer, step)
        return GranularRuntime.attend(self, layer, q, step)

    def select(self, layer: int, q: torch.Tensor, step: Step) -> Selection:
        tail, share = self.tail_start(step), self.share
        if self.covers(int(tail) if self.method.tail else step.lengths[0]):
            return Selection(None, None, tail)
        held = share.count(step.lengths[0])
        logits = own_logits(q[0, -1:], self.own_keys(layer, step), self.scale, self.softmax[layer])
        every = self.gathered(logits.logsumexp(1)).logsumexp(0)
        scores = self.scores[:, : max(1, held)]
        scores[0, :held] = (logits - every.unsqueeze(1)).exp().sum(0)
        index = self.index[self.group(layer)]
        counts, wanted = torch.empty_like(tail), torch.full_like(tail, self.k)
        self.elect(scores, share.count(int(tail)), wanted, index, counts)
        return Selection(index[None], counts, tail)
