"""Kascade: anchor layers choose, one list per K/V head; the layers behind each read, head by head,
the list of the anchor's head that is most like theirs.

Source: Kascade (Deshmukh et al., 2025) and microsoft/kascade (DecodeOnlyKascadeStrategy). An anchor
ranks every token, for each K/V head, by the sum over its query heads of their softmax, and takes
k = max(128, a tenth of the tokens). The first anchor (layer 0) attends to everything, the others
to what they chose; a head map leads from a reuse layer's K/V head to the anchor's. Anchors and map
are found by calibration (`python -m tools.calibrate.anchors`). Published anchors: {0, 2, 8, 13, 14}
of Llama-3.1-8B's 32 layers, {0, 2, 7, 14, 23} of Qwen3-8B's 36. Differs: k is of the tokens at the
end of the latest prompt, and prompts are read densely.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.bank.base import Step
from engine.base.checks import integer
from engine.base.errors import SettingError
from engine.methods.base import Method, Runtime, Setup
from engine.methods.full import Full
from engine.methods.select.across.by_logits import (
    ByLogits,
    checked_layers,
    choice_buffers,
    choosers_stay,
    require_room,
)
from engine.methods.select.across.head_map import (
    HOW,
    MAP,
    checked_map,
    read_map,
)
from engine.methods.select.base import Budgeted, Buffer, Selection
from engine.methods.tables.head_table import Facts, checked_facts, require_model
from engine.model.config.config import ModelConfig
from engine.plan.filter_layers import FilterLayers
from engine.plan.layers import LayerPlan, Role, choosers_alike, layer_plan
from engine.plan.needs import Needs

SHARE = 0.1


@dataclass(frozen=True)
class Kascade(Budgeted):
    """Budget as Budgeted's, by default a tenth; least: tokens that a budget by share has at least.
    anchors: ascending layer numbers, of which the first attends to everything; None: those of
    head_map's file, else OmniKV's filter layers. head_map: a table
    [layer][K/V head] of K/V heads of the anchor below, or a file that holds one and names its
    anchors (kascade.json, or a published .npy); None: every head reads its own number's list.
    made_for: numbers of the model that the file names.
    """

    full_prompts = True

    anchors: tuple[int, ...] | None = None
    head_map: tuple[Any, ...] | str | Path | None = None
    least: int = 128
    made_for: Facts = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("least", self.least, 1)
        facts, table, told = self.made_for, self.head_map, None
        if isinstance(table, (str, Path)):
            table, told, facts = read_map(Path(table))
        if self.anchors is not None:
            object.__setattr__(
                self, "anchors", checked_layers("anchors", self.anchors, "(0, 2, 8, 13)")
            )
            if told is not None and told != self.anchors:
                raise SettingError(
                    f"anchors: found {self.anchors}, and a head map that was made for {told}; "
                    "leave anchors out"
                )
        else:
            object.__setattr__(self, "anchors", told)
        object.__setattr__(self, "made_for", checked_facts(facts))
        object.__setattr__(self, "head_map", None if table is None else checked_map(table))

    def budget(self, length: int) -> int:
        """Tokens that a K/V head reads: those asked for, or the share, `least` at least."""
        if self.tokens is not None:
            return self.tokens
        share = SHARE if self.share is None else self.share
        return max(self.least, math.floor(share * length))

    def plan(self, config: ModelConfig) -> LayerPlan:
        """FULL below the first anchor, which is FILTER; all others are SPARSE, and each anchor is
        in its own group. Raises SettingError for another model's map or anchors.
        """
        if self.head_map is not None:
            assert isinstance(self.head_map, tuple)
            require_model(self.head_map, self.made_for, config, MAP)
        layers, anchors = config.num_layers, self.anchors or ()
        if anchors and anchors[-1] >= layers:
            raise SettingError(
                f"anchors: found {anchors[-1]}, expected numbers from 0 to {layers - 1} "
                f"(the model has {layers} layers); {HOW}"
            )
        require_room(self, config)
        others = config.local_layers, config.recurrent_layers
        return choosers_alike(layer_plan(layers, anchors, 0, *others))

    def completed(self, filter_layers: Callable[[], FilterLayers]) -> Method:
        """With the model's filter layers as anchors where none were given; Full() where it has
        none.
        """
        if self.anchors is not None:
            return self
        known = filter_layers().layers
        return replace(self, anchors=known) if known else Full()

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """One score per token and K/V head, shared by the anchors, and each one's chosen tokens."""
        return choice_buffers(self, plan, capacity, batch * config.num_kv_heads)

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """Anchors read every K and stay on the device; every K/V head's rows come over apart."""
        needs = super().needs(plan, config, capacity, itemsize)
        return choosers_stay(needs, plan, config.num_kv_heads)

    def runtime(self, setup: Setup) -> Runtime:
        return KascadeRuntime(self, setup)


class KascadeRuntime(ByLogits):
    """A choice per K/V head, read through the head map."""

    method: Kascade

    def __init__(self, method: Kascade, setup: Setup):
        super().__init__(method, setup)
        anchors = {group.filter_layer for group in setup.plan.groups}
        own = tuple(range(setup.config.num_kv_heads))
        assert not isinstance(method.head_map, (str, Path))
        rows = dict(enumerate(method.head_map or ()))
        # of the layers that read other heads' lists
        self.heads = {
            layer: torch.tensor(rows[layer], device=setup.device)
            for layer in setup.plan.sparse_layers
            if layer not in anchors and rows.get(layer, own) != own
        }

    def score(self, layer: int, q: torch.Tensor, step: Step, lengths: list[int]) -> torch.Tensor:
        """The sum over a K/V head's query heads of their softmax."""
        for b, scores in enumerate(self.scores.unflatten(0, (len(q), -1))):
            weights = self.logs(layer, q, step, b, lengths[b]).weights(len(scores))
            torch.sum(weights, 1, out=scores[:, : lengths[b]])
        return self.scores

    def attend_selection(
        self, layer: int, q: torch.Tensor, step: Step, chosen: Selection
    ) -> torch.Tensor:
        """Attention to the tokens that the anchor's heads chose."""
        if layer in self.heads:
            assert chosen.index is not None
            index = chosen.index.index_select(1, self.heads[layer])
            chosen = replace(chosen, index=index)
        return super().attend_selection(layer, q, step, chosen)

    def chosen_rows(self, layer: int) -> torch.Tensor:
        rows = super().chosen_rows(layer)
        read = layer in self.heads and len(rows) > 1
        return rows[self.heads[layer]] if read else rows

    def choosing_bytes(self, n: int) -> int:
        """K of every token in anchors that attend to their choice, where it leaves one out."""
        config = self.setup.config
        row = config.kv_bytes(self.setup.dtype.itemsize) // config.sides
        alone = sum(
            self.plan.roles[group.filter_layer] is Role.SPARSE for group in self.plan.groups
        )
        return alone * n * row if n > self.k else 0
