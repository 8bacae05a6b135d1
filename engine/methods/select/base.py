"""Methods that keep every token and read a selection of them in each step.

A method writes its settings (`Budgeted`) and one hook, `Selecting.select`. Attention over the
selection, what a step read, the budget's state and the bytes of buffers follow from these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from engine.bank.base import Step, own_rows
from engine.base.checks import at_most_one, fraction, integer
from engine.base.device import crossed
from engine.methods.base import Method, Runtime, Setup
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan, Role
from engine.plan.needs import Needs
from kernels.attention.native import attend as attend_natively
from kernels.attention.native import attend_chosen, attends
from kernels.attention.reference import attend
from kernels.attention.sparse import decode_sparse
from kernels.index.bound import Chosen, takes
from kernels.launch.dispatch import choose
from kernels.prefill.dense import attend_rows

DEFAULT_TOKENS = 2048


class Buffer(NamedTuple):
    """A tensor that a runtime holds on the device; dtype None: the bank's."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None = None

    def nbytes(self, itemsize: int) -> int:
        """Bytes of the tensor where the bank's elements have `itemsize` bytes."""
        return math.prod(self.shape) * (self.dtype.itemsize if self.dtype else itemsize)


@dataclass(frozen=True)
class Budgeted(Method):
    """Budget of a selection: tokens | share, at most one (default 2048 tokens); share is of the
    bank's length at the end of the latest prefill.
    """

    tokens: int | None = None
    share: float | None = None

    named = False

    def __post_init__(self) -> None:
        at_most_one(self, "tokens", "share")
        if self.tokens is not None:
            integer("tokens", self.tokens, 1)
        if self.share is not None:
            fraction("share", self.share)

    @property
    def cannot_draft(self) -> str:
        return ""

    def budget(self, length: int) -> int:
        """Tokens that a sparse layer selects where the latest prefill ended at `length`."""
        if self.share is not None:
            return max(1, math.floor(self.share * length))
        return DEFAULT_TOKENS if self.tokens is None else self.tokens

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """{attribute of the runtime: Buffer} for a bank of `capacity` tokens."""
        return {}

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """Sparse layers may live in host memory; a choice may read them whole."""
        buffers = self.buffers(plan, config, capacity).values()
        return Needs(
            selected=min(capacity, self.budget(capacity)) if plan.chooses else 0,
            device_bytes=sum(buffer.nbytes(itemsize) for buffer in buffers),
            offload=tuple((layer,) for layer in plan.sparse_layers),
            whole_layer=True,
        )


@dataclass(frozen=True)
class Selection:
    """What a sparse layer reads: chosen tokens, and everything from `tail_start` on.

    index [B, h, K] int32: for each of h heads (1, the K/V heads, or the query heads) the first
    counts[b] entries count, ascending; None: everything before the tail. counts, tail_start [B]
    int32; counts [B, h], where lists of a layer or of its K/V heads differ in length. unit:
    consecutive tokens that one entry stands for.
    """

    index: torch.Tensor | None
    counts: torch.Tensor | None
    tail_start: torch.Tensor
    unit: int = 1

    def copy(self) -> Selection:
        """The same choice in tensors of its own, that the next step leaves alone."""
        if self.index is None or self.counts is None:
            return self
        return replace(self, index=self.index.clone(), counts=self.counts.clone())

    def bound(self, kv_heads: int) -> bool:
        """Whether it is of one sequence and has one count, and lists of at most the K/V heads."""
        index, counts = self.index, self.counts
        if index is None or counts is None or counts.shape != (1,):
            return False
        return index.shape[1] in (1, kv_heads) and index.stride(2) == 1

    def told(self, step: Step) -> tuple[torch.Tensor, int, int, int]:
        """(index, entries, first row of the tail, one past its last) of one sequence."""
        assert self.index is not None and self.counts is not None
        return self.index, int(self.counts), int(self.tail_start), step.lengths[0]

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(index, counts) in tokens."""
        assert self.index is not None and self.counts is not None
        if self.unit == 1:
            return self.index, self.counts.contiguous()
        inside = torch.arange(self.unit, dtype=self.index.dtype, device=self.index.device)
        tokens = self.index.unsqueeze(-1) * self.unit + inside
        return tokens.flatten(2), self.counts * self.unit


def mean_counts(chosen: Mapping[int, Selection]) -> dict[int, int]:
    """{group: tokens of its lists on average, rounded up} of the choices that have lists, sequence
    0; asks the device once.
    """
    counts = {group: one.counts for group, one in chosen.items() if one.counts is not None}
    if not counts:
        return {}
    means = torch.stack([count[0].float().mean() for count in counts.values()]).tolist()
    return {group: math.ceil(mean) for group, mean in zip(counts, means)}


class Selecting(Runtime):
    """One session of a Budgeted method. Holds k, the buffers that the method declares as
    attributes, and each group's Selection of the last step.
    """

    method: Budgeted
    k: int = 0

    def __init__(self, method: Budgeted, setup: Setup):
        super().__init__(method, setup)
        self.k = method.budget(0)
        self.chosen: dict[int, Selection] = {}  # by group
        self._attending: dict[int, Chosen] = {}  # by layer
        self._buffers = method.buffers(setup.plan, setup.config, setup.capacity, setup.batch)
        for name, (shape, dtype) in self._buffers.items():
            setattr(self, name, torch.empty(shape, dtype=dtype or setup.dtype, device=setup.device))

    @property
    def nbytes(self) -> int:
        itemsize = self.setup.dtype.itemsize
        return sum(buffer.nbytes(itemsize) for buffer in self._buffers.values())

    def select(self, layer: int, q: torch.Tensor, step: Step) -> Selection:
        """Choose what the layer's group reads in this step. Called at the group's filter layer,
        which may be its only sparse layer. q [B, Q, H, D] rotated.
        """
        raise NotImplementedError

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        group = self.plan.group_of[layer]
        if group is None or not self.plan.groups[group].serves:
            return self.attend_dense(layer, q, step)
        if self.plan.groups[group].filter_layer == layer:
            self.chosen[group] = self.select(layer, q, step)
        chosen = self.chosen[group]
        if self.plan.roles[layer] is not Role.SPARSE or chosen.index is None:
            return self.attend_dense(layer, q, step)
        return self.attend_selection(layer, q, step, chosen)

    def attend_kept(
        self, layer: int, q: torch.Tensor, step: Step, tail_start: torch.Tensor
    ) -> torch.Tensor:
        """Over the group's choice, where it is not one per query head: such a choice has no
        tail.
        """
        chosen = self.chosen[self.plan.kept_group(layer)]
        if chosen.index is None:
            return self.attend_dense(layer, q, step)
        if chosen.index.shape[1] not in (1, self.setup.config.num_kv_heads):
            return self.attend(layer, q, step)
        return self.attend_selection(layer, q, step, chosen)

    def attend_selection(
        self, layer: int, q: torch.Tensor, step: Step, chosen: Selection
    ) -> torch.Tensor:
        """Attention to the chosen tokens and the tail. q [B, Q, H, D] -> the same."""
        if not step.bank.on_host(layer):
            k, v = step.bank.kv(layer)
            if (bound := self._bound_to(layer, q, k, v)) and chosen.bound(k.shape[1]):
                return bound.attend(q, *chosen.told(step), chosen.unit)
            native = chosen.unit > 1 and choose(
                self.setup.backend, q, lambda: attends(k, v, q.shape[3])
            )
            if native == "native":
                assert chosen.index is not None and chosen.counts is not None
                places = chosen.index, chosen.counts, chosen.tail_start, step.visible
                given = self.scale, self.softmax[layer], self.setup.scratch.part, chosen.unit
                return attend_chosen(q, k, v, *places, *given)
        rows = step.bank.picked(layer, *chosen.rows(), chosen.tail_start, step)
        if rows.index.shape[1] not in (1, rows.k.shape[1]):
            return self._attend_by_query_head(layer, q, *rows[:4])
        return decode_sparse(
            q,
            *rows,
            self.scale,
            scratch=self.setup.scratch,
            backend=self.setup.backend,
            softmax=self.softmax[layer],
        )

    def _bound_to(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Chosen | None:
        """A layer's attention with its arguments bound, None where C++ does not take these."""
        bound = self._attending.get(layer)
        if bound is None or not bound.of(k, v):
            softmax, parts = self.softmax[layer], self.setup.scratch.part
            if not takes(self.setup.backend, q, k, v, softmax):
                return None
            bound = Chosen(q.shape[2], k, v, self.scale, softmax, parts)
            self._attending[layer] = bound
        return bound if q.shape[1] == 1 else None

    def _attend_by_query_head(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        index: torch.Tensor,
        counts: torch.Tensor,
    ) -> torch.Tensor:
        """Every query head reads its choice and no tail. index [B, H, K]."""
        out, group = torch.empty_like(q), index.shape[1] // k.shape[1]
        softmax = self.softmax[layer]
        if choose(self.setup.backend, q, lambda: attends(k, v, q.shape[3])) == "native":
            for b, kept in enumerate(counts.tolist()):
                own = self.scale, index[b], kept, k.shape[2], None, softmax
                for j, one in enumerate(q[b]):  # each query sees all that is chosen
                    out[b, j] = attend_natively(one[None], k[b], v[b], *own)[0][0]
            return out
        kv_head = torch.arange(index.shape[1], device=q.device).unsqueeze(1) // group
        for b, kept in enumerate(counts.tolist()):
            rows = index[b, :, :kept].long()
            chosen = k[b][kv_head, rows], v[b][kv_head, rows]  # [H, kept, D]
            if self.setup.backend == "reference":
                seen = [kept] * q.shape[1]
                out[b], _ = attend(q[b], *chosen, seen, self.scale, softmax=softmax)
            else:
                rows_k, rows_v = (t[None] for t in chosen)
                given = self.scale, False, softmax, self.setup.backend
                found = attend_rows(q[b : b + 1], rows_k, rows_v, *given)
                out[b : b + 1] = softmax.sunk(*found)[0]
        return out

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        """Fix k for the answer that follows."""
        self.k = self.method.budget(length)

    # ---------------------------------------------------------------- what a step read

    def tokens_read(self, n: int) -> int:
        """Tokens that one K/V head of a sparse layer reads in a step at n tokens."""
        return min(n, self.k)

    def rows_read(self, n: int) -> list[int]:
        sparse, seen = self.tokens_read(n), self.setup.config.rows_seen(n)
        return [
            sparse if role is Role.SPARSE else rows for role, rows in zip(self.plan.roles, seen)
        ]

    def tail_start(self, step: Step) -> torch.Tensor:
        """By default nothing is read beside the choice."""
        return step.visible

    def chosen_rows(self, layer: int) -> torch.Tensor:
        group = self.plan.group_of[layer]
        assert group is not None, f"layer {layer} belongs to no group"
        chosen = self.chosen[group]
        if chosen.index is None:
            return torch.arange(int(chosen.tail_start[0]), device=self.setup.device)[None]
        index, counts = chosen.rows()
        return own_rows(index[0], counts[0]).long()

    def selections(self) -> dict[int, torch.Tensor]:
        """{filter layer: positions that any head chose in the last step, ascending}, sequence 0."""
        groups = map(self.plan.groups.__getitem__, self.chosen)
        layers = (group.filter_layer for group in groups if group.here)
        found = ((layer, self.chosen_rows(layer).unique()) for layer in layers)
        return {layer: rows[rows >= 0].cpu() for layer, rows in found}

    def receive(self, group: int, other: Any, theirs: int) -> None:
        """A choice that is everything crosses without a list."""
        chosen, device = other.chosen[theirs], self.setup.device
        self.chosen[group] = Selection(
            None if chosen.index is None else crossed(chosen.index, device),
            None if chosen.counts is None else crossed(chosen.counts, device),
            crossed(chosen.tail_start, device),
            chosen.unit,
        )

    def choice(self) -> Any:
        return {group: chosen.copy() for group, chosen in self.chosen.items()}

    def load_choice(self, choice: Any) -> None:
        self.chosen = choice

    # ---------------------------------------------------------------- going back

    def state(self) -> Any:
        """k: all else is made anew in every step."""
        return self.k

    def load(self, state: Any, length: int | None) -> None:
        self.k = state
