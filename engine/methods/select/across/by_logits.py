"""Layers that rank every token by their own logits: what such methods share in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from engine.bank.base import Step
from engine.base.checks import found, is_integer
from engine.base.errors import SettingError
from engine.methods.select.base import Budgeted, Buffer, Selecting, Selection
from engine.model.config.config import ModelConfig
from engine.plan.layers import Group, LayerPlan, Role
from engine.plan.needs import Needs
from kernels.attention.native import attend, attends, logits_natively
from kernels.attention.scratch import Scratch
from kernels.launch.dispatch import choose
from kernels.launch.softmax import Softmax
from kernels.rows.forms import key_floats
from kernels.select.topk import select_topk

AT_ONCE = 4096  # tokens scored at a time: K in float32 is 2 MB a head at head_dim 128


def require_room(method: Budgeted, config: ModelConfig) -> None:
    """Raise SettingError for a budget that no context of the model has."""
    if method.tokens is not None and method.tokens > config.max_positions:
        raise SettingError(
            f"tokens: found {method.tokens:,}, expected at most {config.max_positions:,}, the "
            "longest context of this model"
        )


def choosing_layers(
    name: str, layers: tuple[int, ...] | None, config: ModelConfig
) -> tuple[int, ...]:
    """The layers that choose: those of the setting `name`, or without any 2 and 13 of 32 at the
    model's depth. Raises SettingError where the model has no such layer.
    """
    count = config.num_layers
    if layers is None:
        return tuple(i for i in (2, max(4, round(count * 13 / 32))) if i < count)
    if layers[-1] >= count:
        raise SettingError(
            f"{name}: found {layers[-1]}, expected numbers from 0 to {count - 1} (the model has "
            f"{count} layers)"
        )
    return layers


def checked_layers(name: str, layers: Any, such: str = "(2, 13)") -> tuple[int, ...]:
    """Layer numbers as a tuple. Raises SettingError where they are not ascending."""
    numbers = tuple(layers) if isinstance(layers, (list, tuple)) else ()
    if not 0 < len(numbers) <= 4096 or not all(map(is_integer, numbers)):
        raise SettingError(f"{name}: found {found(layers)}, expected layer numbers such as {such}")
    if numbers[0] < 0 or any(a >= b for a, b in zip(numbers, numbers[1:])):
        raise SettingError(
            f"{name}: found {found(numbers)}, expected distinct ascending numbers from 0 on"
        )
    return numbers


def choice_buffers(
    method: Budgeted, plan: LayerPlan, capacity: int, choices: int
) -> dict[str, Buffer]:
    """Scores of one choosing layer, and what each has chosen, for so many choices."""
    sparse = plan.chooses
    k = min(capacity, method.budget(capacity)) if sparse else 0
    return {
        "scores": Buffer((choices, capacity if sparse else 0), torch.float32),
        "index": Buffer((len(plan.groups), choices, k), torch.int32),
    }


def choosers_stay(needs: Needs, plan: LayerPlan, lists: int, together: bool = False) -> Needs:
    """The needs of a method whose choosing layers stay on the device and whose others read so many
    lists of `needs.selected` tokens. together: the layers of a group read the same.
    """
    choosing = {group.filter_layer for group in plan.groups}
    apart = tuple((layer,) for layer in plan.sparse_layers if layer not in choosing)
    return replace(
        needs,
        whole_layer=False,
        step_rows=lists * needs.selected,
        offload=groups_of(plan) if together else apart,
        sliding=True,
        capped=True,
        recurrent=True,
        latent=True,
    )


def groups_of(plan: LayerPlan) -> tuple[tuple[int, ...], ...]:
    """The layers that read the same choice, group by group."""
    return tuple(group.layers for group in plan.groups if group.layers)


def brought(chosen: Selection, layers: tuple[int, ...], step: Step) -> Selection:
    """The choice, once its rows in these layers are on their way from host memory in one copy."""
    if chosen.index is not None:
        step.bank.bring(layers, *chosen.rows(), chosen.tail_start)
    return chosen


def bring_received(chosen: Mapping[int, Selection], groups: Sequence[Group], step: Step) -> None:
    """As `brought`, of the choices, by group, that were made on another device."""
    for number, one in chosen.items():
        if not groups[number].here:
            brought(one, groups[number].layers, step)


class Logged(NamedTuple):
    """Scaled and capped logits float32 [H, n] of one query, and their log-sum-exp [H], sinks in."""

    logits: torch.Tensor
    lse: torch.Tensor

    def weights(self, kv_heads: int) -> torch.Tensor:
        """The softmax of every query head: float32 [Hkv, G, n], in place of the logits."""
        found = self.logits.sub_(self.lse.unsqueeze(-1)).exp_()
        return found.view(kv_heads, -1, found.shape[1])


class ByLogits(Selecting):
    """A group's filter layer ranks all tokens by `score` and takes the k highest, for each of its
    `choices`. Buffers of the method: scores float32 [B * choices, capacity] and index int32
    [groups, B * choices, k]. No CUDA graph: the host knows whether k covers the bank.
    """

    scores: torch.Tensor
    index: torch.Tensor
    logged: Logged | None = None  # of the layer under way, where attention leaves them

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """A layer that chooses leaves its logits where a C++ kernel attends: K is read once."""
        group = self.plan.group_of[layer]
        chooses = group is not None and self.plan.roles[layer] is Role.FILTER
        if not chooses or not self.plan.groups[group or 0].serves or not self._logs(layer, q, step):
            return super().attend(layer, q, step)
        k, v = (rows[0, :, : step.lengths[0]] for rows in step.bank.kv(layer, step.bucket))
        given = self.scale, self.softmax[layer], self.setup.scratch
        out, self.logged = attend_logged(q, k, v, *given)
        try:
            self.chosen[group or 0] = self.select(layer, q, step)
        finally:
            self.logged = None
        return out

    def _logs(self, layer: int, q: torch.Tensor, step: Step) -> bool:
        """Whether a layer's attention leaves the logits that `select` ranks."""
        if q.shape[:2] != (1, 1) or step.bank.on_host(layer):
            return False
        k, v = step.bank.kv(layer, step.bucket)
        room = self.setup.scratch.logits.numel() >= q.shape[2] * k.shape[2]
        return room and choose(self.setup.backend, q, lambda: attends(k, v, q.shape[3])) == "native"

    def logs(self, layer: int, q: torch.Tensor, step: Step, b: int, n: int) -> Logged:
        """The logits of sequence b's newest query over its first n tokens. Held until the next
        call.
        """
        if self.logged is not None:
            return self.logged
        k = step.bank.kv(layer, step.bucket)[0][b, :, :n]
        given = self.scale, self.softmax[layer], self.setup.scratch, self.setup.backend
        return logs_of(q[b, -1:], k, *given)

    def score(self, layer: int, q: torch.Tensor, step: Step, lengths: list[int]) -> torch.Tensor:
        """What ranks the tokens, float32 [B * choices, at least the longest]."""
        raise NotImplementedError

    def select(self, layer: int, q: torch.Tensor, step: Step) -> Selection:
        group, lengths = self.plan.group_of[layer], step.lengths
        if max(lengths) <= self.k:
            return Selection(None, None, step.visible)
        assert group is not None
        scores = self.score(layer, q, step, lengths)
        given = self.k, step.visible, self.setup.backend
        return highest(self.index[group], scores, step.visible, *given)


def highest(
    index: torch.Tensor,
    scores: torch.Tensor,
    stop: torch.Tensor,
    k: int | torch.Tensor,
    tail: torch.Tensor,
    backend: str,
    unit: int = 1,
) -> Selection:
    """The k highest of scores [B * choices, n] below stop [B] int32, in index int32 [B * choices,
    most], as a choice whose tail begins at tail [B] int32. k: a number or int32 [B]; unit: tokens
    that a score is of.
    """
    choices = len(index) // len(stop)
    stop = stop.repeat_interleave(choices)
    most = torch.full_like(stop, k) if isinstance(k, int) else k.repeat_interleave(choices)
    counts = torch.empty_like(stop)
    select_topk(scores, torch.zeros_like(stop), stop, most, index, counts, backend=backend)
    return Selection(index.view(len(tail), choices, -1), counts[::choices], tail, unit)


def attend_logged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    softmax: Softmax,
    scratch: Scratch,
) -> tuple[torch.Tensor, Logged]:
    """Attend with one query to all rows by the C++ kernel, and leave its logits: K is read once.
    q [1, 1, H, D]; k, v [Hkv, n, D]. They lie in scratch.logits where that has room.
    """
    heads, n = q.shape[2], k.shape[1]
    held = _room(scratch, heads * n, q)
    out, lse = attend(
        q[0], k, v, scale, logits=held, softmax=softmax, parts=scratch.part, narrow=True
    )
    return out[None], Logged(held[: heads * n].view(heads, n), lse[-1])


def _room(scratch: Scratch, floats: int, q: torch.Tensor) -> torch.Tensor:
    held = scratch.logits
    return held if held.numel() >= floats else torch.empty(floats, device=q.device)


def logs_of(
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    softmax: Softmax,
    scratch: Scratch,
    backend: str = "auto",
) -> Logged:
    """The logits of one query, and no value read. q [1, H, D]; k [Hkv, n, D], floats or packed.
    They lie in scratch.logits where that has room.
    """
    held = _room(scratch, q.shape[1] * k.shape[1], q)
    return logs_into(held, q, k, scale, softmax, scratch.part, backend)


def logs_into(
    held: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    scale: float,
    softmax: Softmax,
    parts: torch.Tensor | None = None,
    backend: str = "auto",
) -> Logged:
    """As `logs_of`, in `held`, float32 of at least H * n elements. parts: as in
    kernels/attention/native.py. Mutates held and parts.
    """
    heads, n = q.shape[1], k.shape[1]
    logits = held[: heads * n].view(heads, n)
    if choose(backend, q, lambda: attends(k, k, q.shape[2])) == "native":
        return Logged(logits, logits_natively(q, k, scale, held, softmax, parts))
    lse = torch.full((heads,), float("-inf"), device=q.device)
    for first in range(0, n, AT_ONCE):
        part = slice(first, min(n, first + AT_ONCE))
        some = softmax.capped(head_logits(q[0], k[:, part]).flatten(0, 1) * scale)
        lse = torch.logaddexp(lse, some.logsumexp(-1))
        logits[:, part] = some
    return Logged(logits, softmax.joined(lse.view(len(k), -1, 1, 1)).flatten())


def head_logits(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Unscaled logits of one query, float32 [Hkv, G, n]. q [H, D]; k [Hkv, n, D]."""
    return q.float().view(k.shape[0], -1, q.shape[-1]) @ key_floats(k).mT
