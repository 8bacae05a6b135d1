"""A layer of host memory that lies on the device whole for one step."""

from __future__ import annotations

import torch

from engine.bank.base import SparseRows, Step


class Brought:
    """What a step asks of a bank of a layer that came over whole. k, v [1, Hkv, T, D] views."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self._rows = k, v

    def kv(self, layer: int, stop: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Its K and V; a caller looks at no more than it may see."""
        return self._rows

    def on_host(self, layer: int) -> bool:
        """Whether its rows are still to come: they are there."""
        return False

    def must_stream(self, layer: int, backend: str) -> bool:
        """Whether it comes in blocks: it is there."""
        return False

    def picked(
        self,
        layer: int,
        index: torch.Tensor,
        counts: torch.Tensor,
        tail_start: torch.Tensor,
        step: Step,
    ) -> SparseRows:
        """As Bank.picked."""
        return SparseRows(*self._rows, index, counts, tail_start, step.visible)

    def selected(
        self,
        layer: int,
        index: torch.Tensor,
        counts: torch.Tensor,
        tail_start: torch.Tensor,
        step: Step,
        fetched: bool = True,
    ) -> SparseRows:
        """As Bank.selected."""
        return self.picked(layer, index, counts, tail_start, step)
