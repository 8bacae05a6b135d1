"""Double Sparsity: few channels of K, the same for all tokens and found beforehand, choose tokens.

Source: Yang et al., Post-Training Sparse Attention with Double Sparsity, 2024, section 3, and
andy-yang-1/DoubleSparse (modify_llama.py, offline_calibration.py). Offline, a head's channels are
ranked by the mean of |q * k| over tokens that meet themselves (tools/studies/heavy_channels.py);
the heaviest 16th of them are kept a second time, as labels, and logits of labels choose the k
tokens that a step reads. Published: layers 0 and 1 dense, every query head chooses for itself, no
token has a right of its own, k 2,048 or a 16th of the text. A K/V head has one list of channels,
ranked by the sum over its query heads, so that its labels are stored once. Labels have the bank's
element type, not 4 bits. Prompts are read densely.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from engine.base.checks import integer
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.select.base import Buffer
from engine.methods.select.index.base import (
    Indexed,
    IndexRuntime,
    within_head_dim,
)
from engine.methods.select.index.channels import (
    HOW,
    checked_channels,
    read_channels,
    require_channels,
)
from engine.methods.tables.head_table import Facts, checked_facts
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from kernels.index.choose import choose_by_channels
from kernels.index.indexes import Channels, Ends
from kernels.index.learn import Learnt, learn_channels, told_channels
from kernels.index.step import Now

PART = 16  # of the head dimension, by default


@dataclass(frozen=True)
class DoubleSparsity(Indexed):
    """Budget as Budgeted's. channels: of every layer and K/V head, heaviest first, or a file that
    holds them. count: channels that are labels, None for a 16th of them. dense_layers, gqa_reduce:
    as Indexed's. made_for: numbers of the model that the file names.
    """

    full_prompts = True

    channels: tuple[Any, ...] | str | Path | None = None
    count: int | None = None
    gqa_reduce: str = "none"
    made_for: Facts = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.count is not None:
            integer("count", self.count, 1)
        channels, facts = self.channels, self.made_for
        if isinstance(channels, (str, Path)):
            channels, facts = read_channels(Path(channels))
        object.__setattr__(self, "made_for", checked_facts(facts))
        checked = None if channels is None else checked_channels(channels)
        object.__setattr__(self, "channels", checked)

    @property
    def name(self) -> str:
        return "double_sparsity"

    def labels(self, config: ModelConfig) -> int:
        """count, or a 16th of the head dimension."""
        return max(1, config.head_dim // PART) if self.count is None else self.count

    def plan(self, config: ModelConfig) -> LayerPlan:
        """Raises SettingError for another model's channels, or more than a head has."""
        count = self.labels(config)
        within_head_dim("count", count, config)
        if self.channels is not None:
            assert isinstance(self.channels, tuple)
            require_channels(self.channels, self.made_for, count, config)
        return super().plan(config)

    def validate(self, plan: LayerPlan) -> None:
        """Raise SettingError without channels."""
        if self.channels is None:
            raise SettingError(f"channels: found none, expected a file or a table; {HOW}")

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """Labels of every token, which channels they are, and the logits of heads that share a
        choice.
        """
        layers, heads, count = len(plan.sparse_layers), config.num_kv_heads, self.labels(config)
        found = super().buffers(plan, config, capacity, batch) | {
            "held": Buffer((layers, batch, heads, count, capacity)),
            "heavy": Buffer((layers, heads, count), torch.int64),
        }
        if self.gqa_reduce != "none":
            shape = batch, config.num_heads, capacity if layers else 0
            found["logits"] = Buffer(shape, torch.float32)
        return found

    def runtime(self, setup: Setup) -> Runtime:
        return DoubleSparsityRuntime(self, setup)


class DoubleSparsityRuntime(IndexRuntime):
    """No CUDA graph: the host knows which rows are new."""

    method: DoubleSparsity
    held: torch.Tensor
    heavy: torch.Tensor
    logits: torch.Tensor | None = None

    def __init__(self, method: DoubleSparsity, setup: Setup):
        super().__init__(method, setup)
        assert isinstance(method.channels, tuple)
        count = self.heavy.shape[-1]
        for group, own in enumerate(self.plan.groups):
            lists = [head[:count] for head in method.channels[own.filter_layer]]
            self.heavy[group] = torch.tensor(lists)

    @cached_property
    def _by(self) -> list[Channels]:
        """What each group chooses by."""
        settings = self.method.gqa_reduce, 1.0, self.logits
        return [
            Channels(self.scores, chosen, *settings, rows=rows, channels=heavy)
            for chosen, rows, heavy in zip(self.index, self.held, self.heavy)
        ]

    def absorb(self, group: int, b: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        learn_channels(self.held[group, b], first, k, self.heavy[group], self.setup.backend)

    def rank(self, group: int, q: torch.Tensor, lengths: list[int], ends: Ends) -> None:
        choose_by_channels(self._by[group], q, lengths, ends, backend=self.setup.backend)

    def by(self, group: int) -> Channels:
        return self._by[group]

    def told(self, n: int, tail: int, stop: torch.Tensor, room: torch.Tensor) -> Now:
        return Now(n, n, tail, stop, room)

    def absorbed(self, group: int, k: torch.Tensor, v: torch.Tensor) -> list[tuple[str, Learnt]]:
        return [("channels", told_channels(self.held[group, 0], k, self.heavy[group]))]

    def index_bytes(self, n: int) -> int:
        """The labels of every token."""
        heads, count = self.held.shape[2:4]
        return heads * count * n * self.held.element_size()
