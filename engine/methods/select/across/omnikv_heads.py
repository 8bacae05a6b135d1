"""OmniKV with a list per K/V head: a filter layer's K/V head ranks the tokens by its own query
heads alone, and the heads of that number in the layers behind read its list.

Source: the OmniKV paper (ICLR 2025), section 4, Eq. 3, whose maximum runs over all heads; here it
runs over a group. Its tail, filter layers and selectors are OmniKV's. With one K/V head it is
OmniKV. Over layers in host memory a step waits for what the heads chose, each row once and a
group's layers together, and nothing stays on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.bank.base import Step
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.omnikv.method import OmniKV
from engine.methods.omnikv.runtime import OmniKVRuntime
from engine.methods.select.across.by_logits import (
    attend_logged,
    bring_received,
    brought,
    groups_of,
    highest,
    logs_of,
)
from engine.methods.select.base import Selection
from engine.model.config.config import ModelConfig
from engine.plan.layers import TAIL_BLOCK, LayerPlan
from engine.plan.needs import Needs
from kernels.attention.dense import decode_dense
from kernels.attention.native import attends, head_most
from kernels.attention.sparse import decode_sparse
from kernels.launch.dispatch import choose
from kernels.select.window_scores import window_scores


@dataclass(frozen=True)
class OmniKVHeads(OmniKV):
    """Settings as OmniKV's; the budget is of every K/V head."""

    full_prompts = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.official or self.prefill_ratio is not None:
            raise SettingError(
                "omnikv_heads: official and prefill_ratio do not go with a list per K/V head; "
                "leave them out"
            )

    @property
    def name(self) -> str:
        return "omnikv_heads"

    def plan(self, config: ModelConfig) -> LayerPlan:
        """As OmniKV's. Raises SettingError for windows over attention sinks, which are a head's."""
        if config.block.sinks and self.selector != "last":
            raise SettingError(
                f"selector: found {self.selector!r}, which omnikv_heads does not know in a model "
                f"with attention sinks ({config.family}); leave it out"
            )
        return super().plan(config)

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """Scores and indices per K/V head; a step waits for every list's rows and the tail."""
        needs, lists = super().needs(plan, config, capacity, itemsize), config.num_kv_heads
        return replace(
            needs,
            device_bytes=lists * needs.device_bytes,
            fetches=False,
            cuda_graph=False,
            step_rows=lists * needs.selected + needs.tail + TAIL_BLOCK,
            offload=groups_of(plan),
        )

    def runtime(self, setup: Setup) -> Runtime:
        return HeadsRuntime(self, setup)


class HeadsRuntime(OmniKVRuntime):
    """Buffers: scores [B * Hkv, capacity] float32, index [B, Hkv, K] int32 per group. To kernels
    that score, K/V heads are sequences.
    """

    method: OmniKVHeads

    def __init__(self, method: OmniKVHeads, setup: Setup):
        super().__init__(method, setup)
        self.lists = setup.config.num_kv_heads
        self.scores = self.scores.repeat(self.lists, 1)
        self.index = [index.repeat(1, self.lists, 1) for index in self.index]

    def attend_and_select(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        scores = self.scores[:, : step.bucket]
        if self.window:
            out = self.attend_dense(layer, q, step)
            self._score_window(layer, step, scores)
        else:
            out = self._score(layer, q, step, scores)
        if self.method.sink:
            scores[:, : self.method.sink] = float("inf")  # always chosen, inside the budget
        self.choose(self._group(layer), scores, step)
        return out

    def choose(self, group: int, scores: torch.Tensor, step: Step, counted: bool = False) -> None:
        """Select every head's k tokens with the highest of `scores` [B * Hkv, bucket] before the
        tail.
        """
        stop, index = step.tail_start(self.method.tail), self.index[group].flatten(0, 1)
        chosen = highest(index, scores, stop, self.k_device, stop, self.setup.backend)
        assert chosen.counts is not None
        self.counts[group].copy_(chosen.counts)
        brought(chosen, self.plan.groups[group].layers, step)

    def received(self, step: Step) -> None:
        stop = step.tail_start(self.method.tail)
        lists = enumerate(zip(self.index, self.counts))
        chosen = {group: Selection(*one, stop) for group, one in lists}
        bring_received(chosen, self.plan.groups, step)

    def _score(self, layer: int, q: torch.Tensor, step: Step, scores: torch.Tensor) -> torch.Tensor:
        """Attention to everything; leaves every K/V head's maxima in `scores`."""
        k, v = step.bank.kv(layer, step.bucket)
        softmax, backend, kind = self.softmax[layer], self.setup.backend, self.method.kind
        native = choose(backend, q, lambda: attends(k, v, q.shape[3])) == "native"
        if native or softmax.sinks is not None:  # which are not one sequence's
            return self._score_by_logits(layer, q, step, scores, native)
        out = decode_dense(
            self._apart(q),
            k.flatten(0, 1)[:, None],
            v.flatten(0, 1)[:, None],
            step.visible.repeat_interleave(self.lists),
            self.scale,
            scores=scores,
            kind=kind,
            backend=backend,
            softmax=softmax,
        )
        return out.unflatten(0, (len(q), self.lists)).transpose(1, 2).reshape(q.shape)

    def _score_by_logits(
        self, layer: int, q: torch.Tensor, step: Step, scores: torch.Tensor, native: bool
    ) -> torch.Tensor:
        """As `_score`, from the logits of all heads; one query's kernel reads K once."""
        (k, v), scratch = step.bank.kv(layer, step.bucket), self.setup.scratch
        given, kind = (self.scale, self.softmax[layer], scratch), self.method.kind
        at_once = native and q.shape[:2] == (1, 1)
        out = None if at_once else self.attend_dense(layer, q, step)
        for b, n in enumerate(step.lengths):
            if at_once:
                out, logged = attend_logged(q, k[0, :, :n], v[0, :, :n], *given)
            else:
                logged = logs_of(q[b, -1:], k[b, :, :n], *given, self.setup.backend)
            own, weighed = scores.unflatten(0, (-1, self.lists))[b, :, :n], kind == "softmax"
            if native:
                head_most(logged.logits, logged.lse if weighed else None, own)
                continue
            found = logged.weights(self.lists) if weighed else logged.logits
            torch.amax(found.view(self.lists, -1, n), 1, out=own)
        assert out is not None
        return out

    def _score_window(self, layer: int, step: Step, scores: torch.Tensor) -> None:
        """Leave every K/V head's weighted maxima over the window's queries in `scores`."""
        k = step.bank.kv(layer, step.bucket)[0]
        window_scores(
            self._apart(step.window_queries(layer, self.window)),
            k.flatten(0, 1)[:, None],
            step.visible.repeat_interleave(self.lists),
            self.scale,
            self.alpha,
            self.method.kind,
            scores,
            backend=self.setup.backend,
            softmax=self.softmax[layer],
        )

    def _apart(self, q: torch.Tensor) -> torch.Tensor:
        """Queries [B, Q, H, D] as sequences of K/V heads: [B * Hkv, Q, G, D]."""
        return q.unflatten(2, (self.lists, -1)).transpose(1, 2).flatten(0, 1).contiguous()

    def _over(
        self, layer: int, group: int, q: torch.Tensor, step: Step, tail_start: torch.Tensor
    ) -> torch.Tensor:
        """Attention of every head over its list and the tail."""
        rows = step.bank.picked(layer, self.index[group], self.counts[group], tail_start, step)
        return decode_sparse(
            q,
            *rows,
            self.scale,
            scratch=self.setup.scratch,
            backend=self.setup.backend,
            softmax=self.softmax[layer],
        )
