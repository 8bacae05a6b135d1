"""The paper's two ablations of the context bank: a selection per layer instead of per group, and
loads that are not packed by group.

Source: OmniKV paper, Table 7 ("without context bank").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch

from engine.bank.base import Bank, Step
from engine.bank.brought import Brought
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.omnikv.method import OmniKV
from engine.methods.omnikv.runtime import OmniKVRuntime
from engine.model.config.config import ModelConfig
from engine.plan.layers import TAIL_BLOCK, LayerPlan, single_layer_groups
from engine.plan.needs import Needs
from kernels.attention.native import attends, score_natively
from kernels.launch.dispatch import choose


@dataclass(frozen=True)
class OmniKVPerLayer(OmniKV):
    """Every layer from the first filter layer on scores everything itself and attends to its own
    choice; nothing is reused.

    Settings as OmniKV's; of filter_layers only the first counts. Over an offloaded bank every
    layer comes back whole in every step, to be scored: selection without sharing saves no bytes.
    """

    full_prompts = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.official or self.prefill_ratio is not None:
            raise SettingError(
                "omnikv_per_layer: official and prefill_ratio do not go with a selection per "
                "layer; leave them out"
            )

    @property
    def name(self) -> str:
        return "omnikv_per_layer"

    def plan(self, config: ModelConfig) -> LayerPlan:
        """FULL below the first filter layer; above, every layer is SPARSE in its own group."""
        first, count = (self.filter_layers or (0,))[0], config.num_layers
        OmniKV.plan(replace(self, filter_layers=(first,)), config)  # refuses what it refuses
        others = config.local_layers, config.recurrent_layers
        return single_layer_groups(count, range(first, count), *others)

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """No fetch: scores need every K, so whole layers come over and slots would serve
        nothing.
        """
        return replace(super().needs(plan, config, capacity, itemsize), fetches=False)

    def runtime(self, setup: Setup) -> Runtime:
        return PerLayerRuntime(self, setup)


class PerLayerRuntime(OmniKVRuntime):
    """Each sparse layer chooses, then reads what it chose."""

    def choosing_bytes(self, n: int) -> int:
        """K of every token, where any may be left out."""
        config = self.setup.config
        row = config.kv_bytes(self.setup.dtype.itemsize) // config.sides
        chooses = min(self.rows_read(n), default=n) < n
        return len(self.plan.sparse_layers) * n * row if chooses else 0

    def attend_sparse(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """A layer in host memory comes over once, for its scores and for what they choose."""
        if step.bank.on_host(layer):
            brought = cast(Bank, Brought(*step.bank.kv(layer, step.bucket)))
            step = replace(step, bank=brought)
            self.attend_and_select(layer, q, step)
        elif not self._select_alone(layer, q, step):
            self.attend_and_select(layer, q, step)
        return super().attend_sparse(layer, q, step)

    def _select_alone(self, layer: int, q: torch.Tensor, step: Step) -> bool:
        """Choose by K alone where a C++ kernel can: what the layer would attend to is not used."""
        if self.window or q.shape[1] > 1 or step.bank.on_host(layer):
            return False
        k, v = step.bank.kv(layer, step.bucket)
        if choose(self.setup.backend, q, lambda: attends(k, v, q.shape[3])) != "native":
            return False
        scores, kind = self.scores[:, : step.bucket], self.method.kind
        scratch = self.setup.scratch
        given = k, step.visible, self.scale, scores, kind, scratch.logits, scratch.part
        score_natively(q, *given, self.softmax[layer])
        if self.method.sink:
            scores[:, : self.method.sink] = float("inf")
        self.choose(self._group(layer), scores, step)
        return True


@dataclass(frozen=True)
class OmniKVUnpacked(OmniKV):
    """OmniKV with sparse layers that load one by one: indices to the host, a gather there, a copy
    that is waited for, nothing kept on the device.
    """

    full_prompts = True

    @property
    def name(self) -> str:
        return "omnikv_unpacked"

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        needs = super().needs(plan, config, capacity, itemsize)
        return replace(
            needs,
            fetches=False,
            step_rows=needs.selected + needs.tail + TAIL_BLOCK,
            offload=tuple((layer,) for layer in plan.sparse_layers),
        )
