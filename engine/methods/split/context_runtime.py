"""Full attention, OmniKV and its ablations over rows that lie on several ranks, each of its own
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from engine.bank.base import Bank, Opened, SparseRows, Step
from engine.bank.split.context_bank import ContextBank
from engine.methods.base import Method, Runtime, Setup, device_int
from engine.methods.controls.controls import (
    NewestRuntime,
    OmniKVRandom,
    RandomRuntime,
    UnscoredRuntime,
)
from engine.methods.omnikv.runtime import OmniKVRuntime
from engine.methods.omnikv.settings import Settings
from engine.methods.split.context_attention import (
    candidates,
    dense_part,
    kept_mass,
    merged,
    natively,
    own_logits,
    prompt_attention,
    score,
    score_by_window,
    sparse_part,
    winners,
)
from kernels.select.topk import select_topk


class Everything(Runtime):
    """Attention to everything, which the ranks bring part by part."""

    def __init__(self, method: Method, setup: Setup) -> None:
        super().__init__(method, setup)
        share, gathered = setup.config.context, setup.gathered
        assert share is not None and gathered is not None
        self.share, self.gathered = share, gathered

    @property
    def reads_whole_prompts(self) -> bool:
        return True

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        return self._attend_many(layer, q, bank, start)

    def attend_opened(
        self, layer: int, q: torch.Tensor, bank: Bank, start: int, opened: Opened
    ) -> torch.Tensor:
        return self._attend_many(layer, q, bank, start, opened)

    def _attend_many(
        self, layer: int, q: torch.Tensor, bank: Bank, first: int, opened: Opened | None = None
    ) -> torch.Tensor:
        scale, _, ahead, softmax, backend = self._streamed(layer, bank)
        given = first, self.share, self.gathered, scale, softmax, backend, ahead, opened
        return prompt_attention(q, own_bank(bank), layer, *given)

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
        n, queries = step.lengths[0], q.shape[1]
        if scores is None and (queries > 1 or step.bank.on_host(layer)):
            return self._attend_many(layer, q, step.bank, n - queries)
        rows, held = own_bank(step.bank).kv(layer), self.share.count(n)
        scratch, backend, softmax = self.setup.scratch, self.setup.backend, self.softmax[layer]
        given = self.scale, softmax, scratch, backend, scores is not None
        part, logits = dense_part(q, rows, held, *given)
        out, lse = merged(part, self.gathered, q.dtype, softmax)
        if scores is not None and logits is not None:
            shares = lse[0, 0] if kind == "softmax" else None
            score(logits, shares, scores[0, :held], natively(q, *rows, backend))
        return out

    def elect(
        self,
        scores: torch.Tensor,
        before: int,
        k: torch.Tensor,
        index: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """Choose the k int32 [1] first of all ranks' tokens, by scores [1, T] of own rows, of which
        those below `before` may be chosen: their positions to index int32 [1, K], how many to
        counts int32 [1]. Returns their scores float32.
        """
        zero, listed = torch.zeros_like(k), torch.zeros_like(k)
        rows, below = torch.empty_like(index), torch.full_like(k, before)
        given = zero, below, k, rows, listed, self.setup.scratch, self.setup.backend
        select_topk(scores, *given)
        lists = self.gathered(candidates(scores[0], rows[0], self.share))
        return winners(lists, k, index, counts)

    def over(self, layer: int, q: torch.Tensor, rows: SparseRows) -> torch.Tensor:
        """Attention of a step's query to each rank's part of a selection and of the tail."""
        softmax, setup = self.softmax[layer], self.setup
        part = sparse_part(q, rows, self.scale, softmax, setup.scratch, setup.backend)
        return merged(part, self.gathered, q.dtype, softmax)[0]

    def own_step(self, step: Step) -> Step:
        """The step as this rank's rows see it."""

        def made() -> Step:
            own, held = own_bank(step.bank), self.share.count(step.lengths[0])
            visible = torch.full_like(step.visible, held)
            where = own, own.capacity, step.query_ring, step.rotary
            return Step(step.positions, visible, *where)

        return step.once("own step", made)

    def own_keys(self, layer: int, step: Step) -> Iterator[torch.Tensor]:
        """K [1, Hkv, n, D] of this rank's rows, block by block."""
        held = self.share.count(step.lengths[0])
        for _, k, _ in own_bank(step.bank).blocks(layer, 0, held, ahead=False):
            yield k

    def mass_kept(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        share = self.share
        held = share.count(step.lengths[0])
        tail = torch.arange(share.count(int(self.tail_start(step))), held)
        kept = torch.cat([share.rows_of(self.chosen_rows(layer)), tail])
        given = self.gathered, self.scale, self.softmax[layer]
        return kept_mass(q[0, -1:], self.own_keys(layer, step), kept, *given)


class ContextOmniKV(Everything, OmniKVRuntime):
    """OmniKV whose ranks choose what one process would, and attend each to its part of it. `index`
    has positions, as of one process; `scores` are of own rows.
    """

    method: Settings

    def __init__(self, method: Method, setup: Setup) -> None:
        super().__init__(method, setup)
        # this rank's rows of each group's selection, and how many they are
        self._own = [(torch.full_like(index, -1), device_int(0, setup)) for index in self.index]
        self._won = self.scores.new_empty(0)

    def attend_kept(
        self, layer: int, q: torch.Tensor, step: Step, tail_start: torch.Tensor
    ) -> torch.Tensor:
        step.bank.landed(layer, step)
        return super().attend_kept(layer, q, step, tail_start)

    def attend_and_select(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        if self.window:
            out = self.attend_dense(layer, q, step)
            self._score_by_window(layer, step)
        else:
            out = self.attend_dense(layer, q, step, self.scores, self.method.kind)
        self._choose_own(layer, step)
        return out

    def _score_by_window(self, layer: int, step: Step) -> None:
        """Score this rank's rows by the newest queries, of which there are as many as tokens."""
        n, share = step.lengths[0], self.share
        live = min(self.window, n)
        queries = step.window_queries(layer, self.window)[0, -live:]
        seen = torch.tensor([share.count(stop) for stop in range(n - live + 1, n + 1)])
        keys = partial(self.own_keys, layer, step)
        given = seen, self.alpha[-live:], self.gathered, self.scale, self.softmax[layer]
        scores = self.scores[0, : share.count(n)]
        score_by_window(queries, keys, *given, self.method.kind, scores)

    def _choose_own(self, layer: int, step: Step) -> None:
        """Choose for the layer's group by the scores that there are now."""
        if self.method.sink:
            self.scores[:, : self.share.count(self.method.sink)] = float("inf")
        self.choose(self._group(layer), self.scores, step)

    def choose(self, group: int, scores: torch.Tensor, step: Step, counted: bool = False) -> None:
        """Select the group's tokens among all ranks' candidates, and note this rank's of them."""
        index, counts = self.index[group][:, 0], self.counts[group]
        self._won = self.elect(scores, self._tail(step), self.k_device, index, counts)
        self._note(group, step.bank)

    def _note(self, group: int, bank: Bank) -> None:
        """Note this rank's part of a group's selection."""
        assert isinstance(bank, ContextBank), "a bank that is not split by context"
        self._own[group] = bank.part_of(self.index[group], self.counts[group])

    def _tail(self, step: Step) -> int:
        """This rank's first row of the tail."""
        tail = self.method.tail
        return step.once("own tail", lambda: self.share.count(int(step.tail_start(tail))))

    def _over(
        self, layer: int, group: int, q: torch.Tensor, step: Step, tail_start: torch.Tensor
    ) -> torch.Tensor:
        index, counts = self._own[group]
        tail = torch.full_like(tail_start, self.share.count(int(tail_start)))
        given = index, counts, tail, self.own_step(step), self.needs.fetches
        return self.over(layer, q, own_bank(step.bank).selected(layer, *given))

    def selection_scores(self) -> dict[int, torch.Tensor]:
        """As OmniKVRuntime: of the last group, whose scores the ranks have told each other."""
        chosen = self.selections()
        if not chosen:
            return {}
        scores = torch.softmax(self._won, 0) if self.method.kind == "raw" else self._won
        return {max(chosen): scores.nan_to_num(0.0, posinf=0.0).cpu()}

    def choice(self) -> Any:
        own = [(rows.clone(), counts.clone()) for rows, counts in self._own]
        return super().choice(), own, self._won.clone()

    def load_choice(self, choice: Any) -> None:
        inner, own, self._won = choice
        self._own = list(own)
        super().load_choice(inner)


class ContextPerLayer(ContextOmniKV):
    """Each sparse layer chooses by K alone, for which the ranks tell each other the log-sum-exp of
    their rows, and then reads what it chose.
    """

    def attend_sparse(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        held, softmax, lse = self.share.count(step.lengths[0]), self.softmax[layer], None
        if self.window:
            self._score_by_window(layer, step)
            self._choose_own(layer, step)
            return super().attend_sparse(layer, q, step)
        logits = own_logits(q[0, -1:], self.own_keys(layer, step), self.scale, softmax)
        if self.method.kind == "softmax":
            lse = self.gathered(logits.logsumexp(1)).logsumexp(0)
            lse = lse if softmax.sinks is None else torch.logaddexp(lse, softmax.sinks)
        score(logits, lse, self.scores[0, :held], native=False)
        self._choose_own(layer, step)
        return super().attend_sparse(layer, q, step)


class ContextUnscored(ContextOmniKV, UnscoredRuntime):
    """A choice that looks at positions alone is every rank's own: nothing is sent for it."""

    def attend_and_select(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        return UnscoredRuntime.attend_and_select(self, layer, q, step)

    def choose(self, group: int, scores: torch.Tensor, step: Step, counted: bool = False) -> None:
        OmniKVRuntime.choose(self, group, scores, step, counted)
        self._note(group, step.bank)

    def selection_scores(self) -> dict[int, torch.Tensor]:
        return {}


class ContextNewest(ContextUnscored, NewestRuntime):
    """The newest tokens before the tail, each read by the rank that holds it."""


class ContextRandom(ContextUnscored, RandomRuntime):
    """Every rank draws the same tokens."""

    method: OmniKVRandom


def own_bank(bank: Bank) -> Bank:
    """The bank of this rank's rows."""
    assert isinstance(bank, ContextBank), "a bank that is not split by context"
    return bank.own
