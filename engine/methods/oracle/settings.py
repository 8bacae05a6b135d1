"""What the bounds of choosing have in common as settings: a budget, who has a list of its own, and
which layers choose.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.base.checks import integer, one_of
from engine.base.errors import SettingError
from engine.methods.select.base import Budgeted, Buffer
from engine.model.config.config import ModelConfig
from engine.plan.layers import TAIL_BLOCK, LayerPlan, single_layer_groups
from engine.plan.needs import Needs

GRANULARITIES = ("layer", "kv_head", "query_head")


@dataclass(frozen=True)
class ByGranularity(Budgeted):
    """Budget k as Budgeted's, of every list. granularity: "layer": one list for all heads;
    "kv_head": one for each K/V head; "query_head": one for each query head.

    dense_layers: first layers that read everything. 2, as Quest and TidalDecode have it: attention
    is spread there, so that any k of tokens loses much and the choice little; 0 bounds all layers.
    sparse_layers: the layers that choose, in place of all from dense_layers on: those of a method
    that is to be bounded. tail: newest tokens that are read beside the choice, by whole blocks as
    OmniKV's; 0: the choice is of all tokens. One list for each query head has none.
    """

    named = False

    granularity: str = "layer"
    dense_layers: int = 2
    sparse_layers: tuple[int, ...] | None = None
    tail: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("granularity", self.granularity, GRANULARITIES)
        integer("dense_layers", self.dense_layers, 0)
        integer("tail", self.tail, 0)
        if self.tail and (self.granularity == "query_head" or self.tail < TAIL_BLOCK):
            raise SettingError(
                f"tail: found {self.tail} under granularity {self.granularity!r}, expected 0, or "
                f"at least {TAIL_BLOCK} with one list per layer or K/V head"
            )
        chosen = self.sparse_layers
        if chosen is not None and (not chosen or list(chosen) != sorted({*chosen})):
            raise SettingError(
                f"sparse_layers: found {chosen}, expected ascending distinct layer numbers"
            )

    def plan(self, config: ModelConfig) -> LayerPlan:
        """FULL where a layer does not choose; every other is SPARSE and chooses for itself."""
        layers, local = config.num_layers, (config.local_layers, config.recurrent_layers)
        chosen = self.sparse_layers or range(self.dense_layers, layers)
        if self.sparse_layers and not 0 <= chosen[0] <= chosen[-1] < layers:
            raise SettingError(
                f"sparse_layers: found {tuple(chosen)}, expected numbers from 0 to {layers - 1} "
                f"(the model has {layers} layers)"
            )
        return single_layer_groups(layers, chosen, *local)

    def lists(self, config: ModelConfig) -> int:
        """Lists that one layer has."""
        apart = {"layer": 1, "query_head": config.num_heads}
        return apart.get(self.granularity, config.num_kv_heads)

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """One score per token and list, shared by the layers, and each layer's chosen tokens."""
        count, sparse = batch * self.lists(config), bool(plan.sparse_layers)
        k = min(capacity, self.budget(capacity)) if sparse else 0
        return {
            "scores": Buffer((count, capacity if sparse else 0), torch.float32),
            "index": Buffer((len(plan.groups), count, k), torch.int32),
        }

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """Any layer that chooses may live in host memory."""
        needs = super().needs(plan, config, capacity, itemsize)
        tail = max(self.tail, TAIL_BLOCK)
        return replace(needs, tail=tail, sliding=True, capped=True, recurrent=True, latent=True)
