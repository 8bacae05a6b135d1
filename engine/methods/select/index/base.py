"""What methods have in common that choose tokens by an index of K on the device.

A method writes its buffers and two hooks: `IndexRuntime.absorb` puts rows into the index, `score`
ranks all tokens by it. Where a layer lives in host memory its index is made while its rows are on
the device, chunk by chunk of the prompt; else, and after a saved session was loaded, by the first
step. A step brings over the rows that it chose and no others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from engine.bank.base import Bank, Step
from engine.base.checks import integer, one_of
from engine.base.errors import SettingError
from engine.methods.base import Setup
from engine.methods.select.base import Budgeted, Buffer, Selecting, Selection
from engine.model.config.config import ModelConfig
from engine.plan.layers import TAIL_BLOCK, LayerPlan, single_layer_groups
from engine.plan.needs import Needs
from kernels.index.by_torch import grouped as grouped
from kernels.index.by_torch import reduced as reduced
from kernels.index.indexes import REDUCE, Channels, Codes, Ends, Index
from kernels.index.learn import Learnt
from kernels.index.step import BoundLayer, Now, binds
from kernels.rows.forms import as_bytes

AT_ONCE = 4096  # rows learnt or scored at a time: K in float32 is 2 MB a head at head_dim 128
REDUCTIONS = tuple(REDUCE)


@dataclass(frozen=True)
class Indexed(Budgeted):
    """Budget as Budgeted's. dense_layers: first layers that read everything. gqa_reduce: how the
    scores of a group's query heads become one choice: "max" | "mean" | "sum"; "none": every query
    head reads its own.
    """

    full_prompts = True
    named = False

    dense_layers: int = 2
    gqa_reduce: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("dense_layers", self.dense_layers, 0)
        one_of("gqa_reduce", self.gqa_reduce, REDUCTIONS)

    def plan(self, config: ModelConfig) -> LayerPlan:
        """FULL below `dense_layers`; every layer above is SPARSE and chooses for itself."""
        layers = config.num_layers
        others = config.local_layers, config.recurrent_layers
        return single_layer_groups(layers, range(self.dense_layers, layers), *others)

    def newest(self, budget: int) -> int:
        """Tokens of a budget that are the newest ones, whatever their scores."""
        return 0

    def since(self, length: int) -> int:
        """The first of `length` tokens that the index wants again with those that follow it: where
        none waits for others, `length`.
        """
        return length

    def grows(self, known: int, length: int) -> bool:
        """Whether an index of the first `known` tokens has more to say of `length` tokens."""
        return True

    def choices(self, config: ModelConfig) -> int:
        """Choices that one layer makes: one per query head, or one per K/V head."""
        return config.num_heads if self.gqa_reduce == "none" else config.num_kv_heads

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """One score per token and choice, shared by the layers, and each layer's chosen tokens."""
        count, layers = batch * self.choices(config), len(plan.sparse_layers)
        budget = min(capacity, self.budget(capacity))
        most = max(0, budget - self.newest(budget))
        return {
            "scores": Buffer((count, capacity if layers else 0), torch.float32),
            "index": Buffer((layers, count, most), torch.int32),
        }

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """Of a layer in host memory each choice may bring rows of its own."""
        needs = super().needs(plan, config, capacity, itemsize)
        return replace(
            needs,
            whole_layer=False,
            step_rows=self.choices(config) * needs.selected,
            tail=max(TAIL_BLOCK, whole_blocks(self.newest(needs.selected))),
            sliding=True,
            recurrent=True,
        )

    def prompt_rows(
        self,
        capacity: int,
        begin: int,
        stop: int,
        total: float,
        room: int,
        first: int | None = None,
    ) -> int:
        """The past, and what waits in it for rows of this chunk."""
        waits = first is None and self.grows(begin, stop)
        return begin + (begin - self.since(begin) if waits else 0)


class IndexRuntime(Selecting):
    """No CUDA graph: the host knows which rows are new."""

    method: Indexed
    scores: torch.Tensor
    index: torch.Tensor
    apart = False  # whether lists of a layer differ in length
    settled = False  # whether a choice knows of committed tokens only, whose rows stay

    def __init__(self, method: Indexed, setup: Setup):
        super().__init__(method, setup)
        self._known = [[0] * setup.batch for _ in self.plan.groups]  # tokens in the index
        self._bound: dict[int, BoundLayer] = {}  # by layer
        self._binds = setup.batch == 1  # whether layers may run in one call each

    # ---------------------------------------------------------------- of the method

    def absorb(self, group: int, b: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put rows first .. first+n-1 of a sequence into the index, where Indexed.grows says so;
        those before Indexed.since are in it, and any that it had from there on are others now.
        k, v [Hkv, n, width] as a bank holds them.
        """
        raise NotImplementedError

    def score(self, group: int, q: torch.Tensor, lengths: list[int]) -> torch.Tensor:
        """What ranks the first lengths[b] tokens, float32 [B * choices, at least the longest].
        q [B, H, D] of the step's last query.
        """
        raise NotImplementedError

    def rank(self, group: int, q: torch.Tensor, lengths: list[int], ends: Ends) -> None:
        """Make a step's choice by `score`, which a method that leaves it to one kernel need not
        have.
        """
        scores = self.score(group, q, lengths)
        ends = ends._replace(room=self.wanted(ends.stop, ends.room))
        Index(scores, self.index[group], "none").take(ends, self.setup.backend)

    def completed(self, group: int, chosen: Selection, lengths: list[int]) -> Selection:
        """A choice of a step with what else its attention needs."""
        return chosen

    def begins(self, group: int, b: int, first: int) -> int:
        """From which row on the index of a sequence is made anew, where rows from `first` on are
        others.
        """
        return first

    # ---------------------------------------------------------------- of a method, for one call

    def by(self, group: int) -> Channels | Codes | None:
        """What a group chooses by, where a step may leave it to one call for each layer: C++ does
        there what `absorb`, `rank` and `completed` say of one token. None: these run, as they must
        in a subclass that has others of its own.
        """
        return None

    def told(self, n: int, tail: int, stop: torch.Tensor, room: torch.Tensor) -> Now:
        """What `rank` tells its kernel of sequence 0 at n tokens, whose tail begins at `tail`."""
        raise NotImplementedError

    def absorbed(self, group: int, k: torch.Tensor, v: torch.Tensor) -> list[tuple[str, Learnt]]:
        """What C++ is told of a group's rows k, v [Hkv, T, D], so that it absorbs one of them."""
        return []

    def mean(self, group: int) -> torch.Tensor | None:
        """What has the weight of what a group leaves out, float32 [Hkv, D]."""
        return None

    def noted(self, group: int, n: int, told: bool) -> None:
        """Note that n tokens are learnt, the last by the call that follows if C++ is told so."""

    # ---------------------------------------------------------------- learning

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        self.truncate(start)

    def truncate(self, length: int) -> None:
        for group, known in enumerate(self._known):
            for b, tokens in enumerate(known):
                known[b] = tokens if tokens <= length else self.begins(group, b, length)

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        """Full attention, and the index of what will lie in host memory. The model's last layer,
        which comes in the last chunk only, is learnt by the first step.
        """
        group = self.plan.group_of[layer]
        if group is not None and bank.on_host(layer) and self._known[group][0] == start:
            stop, since = start + q.shape[1], self.method.since(start)
            if self.method.grows(start, stop):
                rows = [part[0] for part in bank.newest_rows(layer, start, stop)]
                if since < start:
                    waited = bank.rows(layer, since, start)
                    rows = [joined(old[0], new) for old, new in zip(waited, rows)]
                self.absorb(group, 0, since, *rows)
            self._known[group][0] = stop
        return super().attend_prompt(layer, q, bank, start)

    @property
    def reads_whole_prompts(self) -> bool:
        """The index may as well be made by the first step."""
        return True

    def learn(self, group: int, layer: int, bank: Bank, lengths: list[int]) -> None:
        """Bring the index of a layer's first `lengths` tokens up to date."""
        for b, n in enumerate(lengths):
            known = self._known[group][b]
            again = known >= n and not self.settled
            start = self.begins(group, b, n - 1) if again else known
            for first in range(start, n, AT_ONCE):
                stop = min(n, first + AT_ONCE)
                if self.method.grows(first, stop):
                    since = self.method.since(first)
                    k, v = bank.rows(layer, since, stop)
                    self.absorb(group, b, since, k[b], v[b])
            self._known[group][b] = n

    # ---------------------------------------------------------------- a step

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        group = self.plan.group_of[layer]
        if self._binds and group is not None and self.plan.groups[group].layers:
            found = self._attend_in_one_call(layer, group, q, step)
            if found is not None:
                return found
        return super().attend(layer, q, step)

    def _attend_in_one_call(
        self, layer: int, group: int, q: torch.Tensor, step: Step
    ) -> torch.Tensor | None:
        """`attend`; None where this step or this machine is not for it."""
        if q.shape[1] > 1 or step.bank.on_host(layer):
            return None
        k, v = step.bank.kv(layer)
        bound = self._bound.get(layer)
        if bound is None or not bound.of(k, v):
            index = self.by(group)
            if index is None or not binds(self.setup.backend, q, k, v, self.softmax[layer]):
                self._binds = False
                return None
            given = self._lists[group][1], self.scale, self.softmax[layer]
            more = self.absorbed(group, k[0], v[0]), self.mean(group), self.setup.scratch.part
            bound = self._bound[layer] = BoundLayer(index, q, k, v, *given, *more)
        now, tail, alone = step.once("index in one call", lambda: self._now(step))
        if now is None:
            return None
        known, n = self._known[group], now.tokens
        if not (alone and known[0] == n - 1):
            self.learn(group, layer, step.bank, [n])
        told = known[0] < n
        self.noted(group, n, told)
        out = bound.run(q, now, told)
        known[0] = n
        lists, _, kept = self._lists[group]
        self.chosen[group] = self.completed(group, Selection(lists, kept, tail), [n])
        return out

    def _now(self, step: Step) -> tuple[Now | None, torch.Tensor, bool]:
        """What a step of one sequence tells each layer's call, None where it reads everything; its
        tail; whether its newest token is learnt alone.
        """
        lengths = self.lengths(step)
        if self.covers(lengths):
            return None, step.visible, False
        n, method = lengths[0], self.method
        choices = self._lists[0][0].shape[1]
        tail, stop, room = step.once("index", lambda: self._ends(step, choices))
        alone = method.grows(n - 1, n) and method.since(n - 1) == n - 1
        return self.told(n, int(tail), stop, room), tail, alone

    def select(self, layer: int, q: torch.Tensor, step: Step) -> Selection:
        group, lengths = self.plan.group_of[layer], self.lengths(step)
        assert group is not None
        self.learn(group, layer, step.bank, lengths)
        if self.covers(lengths):
            return Selection(None, None, step.visible)
        index, counts, kept = self._lists[group]
        tail, stop, room = step.once("index", lambda: self._ends(step, index.shape[1]))
        self.rank(group, q[:, -1], lengths, Ends(stop, room, counts))
        return self.completed(group, Selection(index, kept, tail), lengths)

    @cached_property
    def _lists(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Of each group where its choice lies [B, choices, K], how many each list takes int32 [B *
        choices], and of these what `Selection` wants.
        """
        found = []
        for index in self.index:
            counts = torch.zeros(len(index), dtype=torch.int32, device=index.device)
            by_list = counts.view(self.setup.batch, -1)
            lists = index.view(*by_list.shape, -1)
            found.append((lists, counts, by_list if self.apart else by_list[:, 0]))
        return found

    def _ends(self, step: Step, choices: int) -> tuple[torch.Tensor, ...]:
        """Where a step's tail begins, and below which token, and how many, each choice takes."""
        tail, room = self.tail_start(step), self.k - self.method.newest(self.k)
        stop = tail.repeat_interleave(choices)
        return tail, stop, torch.full_like(stop, room)

    def lengths(self, step: Step) -> list[int]:
        """Of how many tokens of each sequence a step's choice knows."""
        return step.lengths

    def covers(self, lengths: list[int]) -> bool:
        """Whether a step reads everything, because nothing is left out or nothing can choose."""
        return max(map(self.choosable, lengths)) <= self.k

    def wanted(self, stop: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """How many of its scores, which `score` has just made, each list takes: int32 [B *
        choices], at most room. stop: its candidates' end.
        """
        return room

    def tail_start(self, step: Step) -> torch.Tensor:
        return (step.visible - self.method.newest(self.k)).clamp_(min=0)

    def choosable(self, n: int) -> int:
        """Tokens of n that compete for the budget."""
        return n

    def tokens_read(self, n: int) -> int:
        """At most: a K/V head whose query heads choose apart reads up to their number times k."""
        apart = self.setup.config.group if self.method.gqa_reduce == "none" else 1
        return min(n, self.k * apart)

    def choosing_bytes(self, n: int) -> int:
        """The index, where the budget does not cover everything."""
        return (
            len(self.plan.sparse_layers) * self.index_bytes(n) if self.choosable(n) > self.k else 0
        )

    def index_bytes(self, n: int) -> int:
        """Bytes of one layer's index that a step at n tokens reads."""
        raise NotImplementedError


def within_head_dim(name: str, count: int, config: ModelConfig) -> None:
    """Raise SettingError where a setting counts more channels than a head of the model has."""
    if count > config.head_dim:
        raise SettingError(
            f"{name}: found {count}, expected at most {config.head_dim}, the head dimension of "
            f"this model ({config.family})"
        )


def whole_blocks(tokens: int) -> int:
    """A tail of so many tokens, rounded up as tails move."""
    return -(-tokens // TAIL_BLOCK) * TAIL_BLOCK


def joined(older: torch.Tensor, newer: torch.Tensor) -> torch.Tensor:
    """Rows of a bank [Hkv, n, width], of any form, behind one another."""
    return torch.cat([as_bytes(older), as_bytes(newer)], 1).view(newer.dtype)
