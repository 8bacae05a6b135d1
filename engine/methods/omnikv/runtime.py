"""OmniKV in one session: the selections of its filter layers and attention over them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from engine.bank.base import Bank, Step
from engine.base.device import carried
from engine.methods.base import Runtime, Setup, device_int
from engine.methods.omnikv.prefill import PrefillSelector
from engine.methods.omnikv.selector import window_weights
from engine.methods.omnikv.settings import Settings
from engine.plan.layers import BY_DESIGN, Role, tail_start
from engine.plan.prefill_time import PrefillFlops
from kernels.attention.sparse import decode_sparse
from kernels.chain.layer import Reading
from kernels.launch.dispatch import NATIVE
from kernels.select.window_scores import window_scores


class OmniKVRuntime(Runtime):
    """One session's selections. Buffers: scores [B, capacity] float32 shared by the filter layers,
    index [B, 1, K] int32 per group.
    """

    method: Settings
    k: int = 0
    lists: int = 0  # that a choice has, one for each K/V head; 0: one for all heads

    def __init__(self, method: Settings, setup: Setup):
        super().__init__(method, setup)
        self.window, selected = self.needs.window, self.needs.selected
        self.alpha = window_weights(method.selector, method.window, setup.device)
        shape = setup.batch, 1, selected
        self.scores = torch.empty(
            setup.batch, setup.capacity if selected else 0, device=setup.device
        )
        self.index = [
            torch.full(shape, -1, dtype=torch.int32, device=setup.device) for _ in self.plan.groups
        ]
        self.counts = [device_int(0, setup) for _ in self.plan.groups]
        self.prefill: PrefillSelector | None = None
        if method.dense_layers != "dense" or method.prefill_ratio and self.plan.sparse_layers:
            self.prefill = PrefillSelector(method, setup)
        self.k_device = device_int(0, setup)
        self.zero = device_int(0, setup)
        # for a session that decodes before it has read anything
        self._set_k(method.budget(self.plan, 0))

    @property
    def nbytes(self) -> int:
        selection = sum(t.numel() * t.element_size() for t in (self.scores, *self.index))
        return selection + (self.prefill.nbytes if self.prefill else 0)

    # ---------------------------------------------------------------- a prompt

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        """Tell the prefill selector how long the prompt is: its end is read densely."""
        if self.prefill:
            self.prefill.total = math.inf if more else stop

    def attend_prompt(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        if self.prefill is None:
            return super().attend_prompt(layer, q, bank, start)
        return self.prefill.attend(layer, q, bank, start)

    @property
    def reads_whole_prompts(self) -> bool:
        return self.prefill is None

    def prompt_flops(self, flops: PrefillFlops, start: int, stop: int) -> tuple[float, float]:
        if self.prefill is None:
            return flops.parts(start, stop)
        return self.prefill.flops(flops, start, stop)

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        """Fix k for the answer that follows."""
        self._set_k(self.method.budget(self.plan, length))

    def _set_k(self, k: int) -> None:
        self.k = k
        self.k_device.fill_(k)

    # ---------------------------------------------------------------- a step

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """By the layer's role: dense, dense and choose, or sparse over the group's selection."""
        role = self.plan.roles[layer]
        if role is Role.SPARSE:
            return self.attend_sparse(layer, q, step)
        if role is Role.FILTER and self.plan.groups[self._group(layer)].serves:
            out = self.attend_and_select(layer, q, step)
            if self.needs.fetches:
                group = self._group(layer)
                step.bank.fetch(self._members(layer), self.index[group], self.counts[group])
            return out
        return self.attend_dense(layer, q, step)

    def chained(self, layer: int) -> Reading | None:
        """As Reads; layers that choose by a window of queries, or beside sinks, do more."""
        if type(self) is not OmniKVRuntime or self.setup.backend not in NATIVE:
            return None
        role = self.plan.roles[layer]
        if role is Role.SPARSE:
            group = self._group(layer)
            return Reading(self.index[group], self.counts[group])
        if role is Role.FILTER and self.plan.groups[self._group(layer)].serves:
            if self.window or self.method.sink or self.setup.across is not None:
                return None
            group = self._group(layer)
            return Reading(self.index[group], self.counts[group], self.method.kind, self.scores)
        return Reading()

    def chained_at(self, n: int) -> tuple[int, int]:
        return tail_start(n, self.method.tail), self.k

    def _group(self, layer: int) -> int:
        group = self.plan.group_of[layer]
        assert group is not None, f"layer {layer} belongs to no group"
        return group

    def _members(self, layer: int) -> tuple[int, ...]:
        return self.plan.groups[self._group(layer)].layers

    def attend_sparse(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention over the group's selection and the tail."""
        return self._over(layer, self._group(layer), q, step, self.tail_start(step))

    def attend_kept(
        self, layer: int, q: torch.Tensor, step: Step, tail_start: torch.Tensor
    ) -> torch.Tensor:
        """Every layer, the filter layers too, reads the selection of its group, or of the nearest
        one below, and the tail.
        """
        return self._over(layer, self.plan.kept_group(layer), q, step, tail_start)

    def attend_verified(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Filter layers choose by the last query's scores, in the pass that attends."""
        if self.plan.roles[layer] is Role.FILTER and self._members(layer):
            return self.attend_and_select(layer, q, step)
        return self.attend_dense(layer, q, step)

    def _over(
        self, layer: int, group: int, q: torch.Tensor, step: Step, tail_start: torch.Tensor
    ) -> torch.Tensor:
        """Attention over a group's selection and the tail."""
        rows = step.bank.selected(
            layer, self.index[group], self.counts[group], tail_start, step, self.needs.fetches
        )
        return decode_sparse(
            q,
            *rows,
            self.scale,
            scratch=self.setup.scratch,
            backend=self.setup.backend,
            softmax=self.softmax[layer],
            logs=self.weights(group),
        )

    def weights(self, group: int) -> torch.Tensor | None:
        """What is added to the logits of a group's selection, float32 [B, K]; None: nothing."""
        return None

    def kept_rows(self, n: int) -> list[int]:
        """Of all layers what a sparse one reads, or a window; the tail may be up to 8 tokens
        longer.
        """
        start = tail_start(n, self.method.tail)
        sparse, seen = min(self.k, start) + n - start, self.setup.config.rows_seen(n)
        return [rows if role in BY_DESIGN else sparse for role, rows in zip(self.plan.roles, seen)]

    def attend_and_select(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """A filter layer: attention to everything, and from the same scores the selection of its
        group.
        """
        group = self._group(layer)
        scratch, backend = self.setup.scratch, self.setup.backend
        scores = self.scores[:, : step.bucket]
        counted = not self.window and not self.method.sink
        if self.window:
            k, v = step.bank.kv(layer, step.bucket)
            out = self.attend_dense(layer, q, step)
            window_scores(
                step.window_queries(layer, self.window),
                k,
                step.visible,
                self.scale,
                self.alpha,
                self.method.kind,
                scores,
                scratch=scratch,
                backend=backend,
                softmax=self.softmax[layer],
            )
        else:
            ranked = step.tail_start(self.method.tail) if counted else None
            out = self.attend_dense(layer, q, step, scores, self.method.kind, ranked)
        if self.method.sink:
            scores[:, : self.method.sink] = float("inf")  # always chosen, inside the budget
        self.choose(group, scores, step, counted)
        return out

    def choose(self, group: int, scores: torch.Tensor, step: Step, counted: bool = False) -> None:
        """Select the group's k tokens with the highest of `scores` [B, bucket] before the tail.
        counted: the layer's attention has counted those already.
        """
        self.choose_of_all(
            scores,
            self.zero,
            step.tail_start(self.method.tail),
            self.k_device,
            self.index[group][:, 0],
            self.counts[group],
            scratch=self.setup.scratch,
            backend=self.setup.backend,
            counted=counted,
        )

    def warm(self, steps: Iterable[Step]) -> None:
        """Choose for the prompt's last queries, so that their tokens are in the working sets before
        the first step asks.
        """
        if not self.needs.fetches:
            return
        for step in steps:
            for group in self.plan.groups:
                if group.here and group.serves:
                    layer = group.filter_layer
                    self.attend(layer, step.window_queries(layer, 1), step)
                # race: the next choice would be written while this one is looked up
                step.bank.wait_fetched(group.layers)

    # ---------------------------------------------------------------- from another device

    def receive(self, group: int, other: Any, theirs: int) -> None:
        """All of the list, whatever it counts: nobody asks how many do."""
        carried(other.index[theirs], self.index[group])
        carried(other.counts[theirs], self.counts[group])

    def received(self, step: Step) -> None:
        """Fetch what was chosen elsewhere for layers of this part."""
        if self.needs.fetches:
            for own, index, counts in zip(self.plan.groups, self.index, self.counts):
                if not own.here:
                    step.bank.fetch(own.layers, index, counts)

    # ---------------------------------------------------------------- what a step read

    def rows_read(self, n: int) -> list[int]:
        start = tail_start(n, self.method.tail)
        sparse = min(self.k, start) + n - start
        seen = zip(self.plan.roles, self.setup.config.rows_seen(n))
        return [sparse if role is Role.SPARSE else rows for role, rows in seen]

    def tail_start(self, step: Step) -> torch.Tensor:
        return step.tail_start(self.method.tail)

    def chosen_rows(self, layer: int) -> torch.Tensor:
        group = self._group(layer)
        rows = self.index[group][0, :, : int(self.counts[group][0])].long()
        return rows if self.lists else rows[0]

    def selections(self) -> dict[int, torch.Tensor]:
        """{filter layer: positions that any list has, ascending}, sequence 0."""
        return {
            group.filter_layer: self.chosen_rows(group.filter_layer).unique().cpu()
            for group in self.plan.groups
            if group.serves and group.here
        }

    def selection_scores(self) -> dict[int, torch.Tensor]:
        """Of the last group only, since the filter layers share one buffer of scores; the highest
        that any list gave.

        Raw scores become shares of the selection (a softmax over it), so that a larger number
        always means more attention.
        """
        chosen = self.selections()
        if not chosen:
            return {}
        layer, positions = max(chosen.items())
        scores = self.scores[: max(1, self.lists), positions.to(self.scores.device)].amax(0).cpu()
        scores = torch.softmax(scores, 0) if self.method.kind == "raw" else scores
        # a sink is chosen by an infinite score, whatever its score
        return {layer: scores.nan_to_num(0.0, posinf=0.0)}

    def choice(self) -> Any:
        return [t.clone() for t in (self.scores, *self.index, *self.counts)]

    def load_choice(self, choice: Any) -> None:
        for mine, theirs in zip((self.scores, *self.index, *self.counts), choice):
            mine.copy_(theirs)

    # ---------------------------------------------------------------- going back

    def state(self) -> Any:
        """k: all else follows from the bank and the query ring."""
        return self.k

    def load(self, state: Any, length: int | None) -> None:
        self._set_k(state)

    def truncate(self, length: int) -> None:
        for counts in self.counts:
            counts.zero_()
