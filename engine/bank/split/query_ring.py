"""A query ring of one ring for each part of a model, on its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from engine.bank.query_ring import QueryRing
from engine.model.config.config import ModelConfig
from engine.plan.needs import MOST_WINDOW


class SplitQueries:
    """Queries [attending layers, B, W, H, D] that lie part by part, each on its device: what a
    QueryRing takes and gives as one tensor.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        self.parts = tuple(parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """As of the one tensor; heads as wide as the widest."""
        layers = sum(part.shape[0] for part in self.parts)
        widest = max(part.shape[4] for part in self.parts)
        return (layers, *self.parts[0].shape[1:4], widest)

    @property
    def dtype(self) -> torch.dtype:
        """As of the one tensor."""
        return self.parts[0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in self.parts)

    def __getitem__(self, index: Any) -> SplitQueries:
        """The same index into every part; it begins with all layers."""
        assert index[0] == slice(None), "layers lie on several devices"
        return SplitQueries([part[index] for part in self.parts])

    def clone(self) -> SplitQueries:
        """A copy."""
        return SplitQueries([part.clone() for part in self.parts])

    def copy_(self, other: SplitQueries) -> None:
        """Take the values of another."""
        for mine, theirs in zip(self.parts, other.parts, strict=True):
            mine.copy_(theirs)


class SplitQueryRing(QueryRing):
    """As QueryRing, with the slots of each part of a model in a ring of its own (`parts`), which
    its steps write. Valid positions are noted here, for all of them.
    """

    def __init__(
        self,
        configs: Sequence[ModelConfig],
        batch: int,
        dtype: torch.dtype,
        devices: Sequence[torch.device],
    ) -> None:
        given = zip(configs, devices, strict=True)
        self.parts = tuple(QueryRing(config, batch, dtype, device) for config, device in given)
        self.slots: Any = SplitQueries([ring.slots for ring in self.parts])
        self.low = self.high = self.changes = 0
        self.kept: dict[int, Any] = {}

    @property
    def nbytes(self) -> int:
        return sum(ring.nbytes for ring in self.parts)

    def write_chunk(self, newest: Any, stop: int) -> None:
        self.changes += 1
        for ring, queries in zip(self.parts, newest.parts, strict=True):
            ring.write_chunk(queries, stop)

    def newest(self, most: int = MOST_WINDOW) -> Any:
        for ring in self.parts:
            ring.low, ring.high = self.low, self.high
        return SplitQueries([ring.newest(most) for ring in self.parts])

    def as_one(self, newest: Any) -> torch.Tensor:
        widest = newest.shape[4]
        parts = [F.pad(part.cpu(), (0, widest - part.shape[4])) for part in newest.parts]
        return torch.cat(parts)

    def taken(self, queries: torch.Tensor) -> Any:
        counts = [ring.slots.shape[0] for ring in self.parts]
        parts = zip(queries.split(counts), self.parts, strict=True)
        return SplitQueries([part[..., : r.slots.shape[4]].to(r.slots) for part, r in parts])
