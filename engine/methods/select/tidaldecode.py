"""TidalDecode: one layer near the bottom scores everything and keeps its top-k, a correction layer
chooses anew, all others reuse.

Source: TidalDecode (Yang et al., 2024), section 3, and DerrickYLJ/TidalDecode
(llama_tidal_attention_forward). Published: layers 0 and 1 dense, layer 2 chooses, the correction
layer is 13 of 32 for Llama-3 (9 for Llama-2), candidates are all tokens, generated ones included, k
between 128 and 4096, prompts are read densely, nothing is offloaded (here the layers that reuse a
choice may live in host memory). Every query head chooses for
itself (its K/V heads are repeated): gqa_reduce="none".
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.bank.base import Step
from engine.base.checks import integer, one_of
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.select.across.by_logits import AT_ONCE, ByLogits, head_logits
from engine.methods.select.base import Budgeted, Buffer
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan, layer_plan
from engine.plan.needs import Needs

REDUCTIONS = ("none", "max", "mean", "all")


@dataclass(frozen=True)
class TidalDecode(Budgeted):
    """Budget k as Budgeted's. select_layer: the first layer that chooses; correction_layer: the
    second, None for 13 of 32 at the model's depth. gqa_reduce: "none": every query head reads its
    own k; "max" | "mean" of a group's logits: a choice per K/V head; "all": the maximum over all
    heads, one choice (as OmniKV's).
    """

    full_prompts = True

    select_layer: int = 2
    correction_layer: int | None = None
    gqa_reduce: str = "none"

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("select_layer", self.select_layer, 0)
        if self.correction_layer is not None:
            integer("correction_layer", self.correction_layer, self.select_layer + 1)
        one_of("gqa_reduce", self.gqa_reduce, REDUCTIONS)

    def plan(self, config: ModelConfig) -> LayerPlan:
        """FULL below the first choice, FILTER where one is made, SPARSE elsewhere; no layer waits,
        because nothing is loaded.
        """
        layers, correction = config.num_layers, self.correction_layer
        # a model too shallow for the default chooses nowhere
        if self.select_layer >= layers and self.select_layer != TidalDecode.select_layer:
            raise SettingError(
                f"select_layer: found {self.select_layer}, expected at most {layers - 1} "
                f"(the model has {layers} layers)"
            )
        if correction is not None and correction >= layers:
            raise SettingError(
                f"correction_layer: found {correction}, expected at most {layers - 1} "
                f"(the model has {layers} layers)"
            )
        if correction is None:
            correction = max(self.select_layer + 2, round(layers * 13 / 32))
        choosing = tuple(layer for layer in (self.select_layer, correction) if layer < layers)
        return layer_plan(layers, choosing, 0, config.local_layers, config.recurrent_layers)

    def choices(self, config: ModelConfig) -> int:
        """Choices that one layer makes: one per query head, per K/V head, or one."""
        return {"none": config.num_heads, "all": 1}.get(self.gqa_reduce, config.num_kv_heads)

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """One score per token and choice, shared by the choosing layers, and each one's chosen
        tokens.
        """
        count, sparse = batch * self.choices(config), plan.chooses
        k = min(capacity, self.budget(capacity)) if sparse else 0
        return {
            "scores": Buffer((count, capacity if sparse else 0), torch.float32),
            "index": Buffer((len(plan.groups), count, k), torch.int32),
        }

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """The layers that choose read every K, and stay on the device."""
        needs = super().needs(plan, config, capacity, itemsize)
        rows = self.choices(config) * needs.selected
        # capped logits have the order of the logits
        return replace(
            needs,
            whole_layer=False,
            step_rows=rows,
            sliding=True,
            capped=True,
            recurrent=True,
            latent=True,
        )

    def runtime(self, setup: Setup) -> Runtime:
        return TidalRuntime(self, setup)


class TidalRuntime(ByLogits):
    """A choice per query head, per K/V head, or one."""

    method: TidalDecode

    def _logs(self, layer: int, q: torch.Tensor, step: Step) -> bool:
        """Not capped ones: their order is the same, but not what rounding makes equal."""
        return not self.softmax[layer].cap and super()._logs(layer, q, step)

    def score(self, layer: int, q: torch.Tensor, step: Step, lengths: list[int]) -> torch.Tensor:
        reduce = self.method.gqa_reduce
        if self.logged is not None:
            logits = self.logged.logits
            if reduce == "none":
                return logits
            n = logits.shape[1]
            found = reduced(logits.view(self.setup.config.num_kv_heads, -1, n), reduce)
            self.scores[:, :n] = found
            return self.scores
        k = step.bank.kv(layer, step.bucket)[0]
        for b, scores in enumerate(self.scores.view(len(q), len(self.scores) // len(q), -1)):
            for first in range(0, lengths[b], AT_ONCE):
                part = slice(first, min(lengths[b], first + AT_ONCE))
                scores[:, part] = reduced_logits(q[b, -1], k[b, :, part], reduce)
        return self.scores

    def tokens_read(self, n: int) -> int:
        """At most: a K/V head whose query heads choose separately reads up to their number
        times k.
        """
        config = self.setup.config
        apart = config.group if self.method.gqa_reduce == "none" else 1
        return min(n, self.k * apart)


def reduced_logits(q: torch.Tensor, k: torch.Tensor, reduce: str) -> torch.Tensor:
    """Unscaled logits of one query as the choice ranks them, float32 [H, Hkv or 1, n]. q [H, D];
    k [Hkv, n, D].
    """
    return reduced(head_logits(q, k), reduce)


def reduced(logits: torch.Tensor, reduce: str) -> torch.Tensor:
    """Logits [Hkv, G, n] as the choice ranks them: [H, Hkv or 1, n]."""
    if reduce == "none":
        return logits.flatten(0, 1)
    if reduce == "all":
        return logits.flatten(0, 1).amax(0, keepdim=True)
    return logits.amax(1) if reduce == "max" else logits.mean(1)
