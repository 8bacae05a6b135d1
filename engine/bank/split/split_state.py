"""The recurrent state of a model in parts: each part's layers have theirs in the part's bank, on
its device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from engine.bank.recurrent.savepoints import Snapshot
from engine.bank.recurrent.state import RecurrentState
from engine.base.device import current


class SplitState(RecurrentState):
    """The states `parts`, which stand after the same tokens. Steps and chunks of a part work on its
    own; snapshots are those of one state of all layers.
    """

    def __init__(self, parts: Sequence[RecurrentState]) -> None:
        self.parts = tuple(parts)
        self._counts = [len(part.sizes.layers) for part in parts]

    @property
    def length(self) -> int:  # type: ignore[override]
        """Tokens that it stands after."""
        return self.parts[0].length

    @property
    def base(self) -> int:  # type: ignore[override]
        """Tokens that S holds."""
        return self.parts[0].base

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def commit(self, length: int) -> None:
        for part in self.parts:
            with current(part.device):
                part.commit(length)

    def holds(self, length: int) -> bool:
        return self.parts[0].holds(length)

    def rewind(self, length: int) -> None:
        for part in self.parts:
            with current(part.device):
                part.rewind(length)

    # ---------------------------------------------------------------- copies

    def snapshot(self) -> Snapshot:
        found = [part.snapshot() for part in self.parts]
        tensors = zip(*(one.tensors for one in found))
        return replace(found[0], tensors=tuple(torch.cat(same) for same in tensors))

    def snapshot_shapes(self, rows: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        found, layers = self.parts[0].snapshot_shapes(rows), sum(self._counts)
        return [((layers, *shape[1:]), dtype) for shape, dtype in found]

    def load(self, held: Snapshot, length: int) -> None:
        stops = accumulate(self._counts)
        for part, count, stop in zip(self.parts, self._counts, stops, strict=True):
            own = tuple(tensor[stop - count : stop] for tensor in held.tensors)
            with current(part.device):
                part.load(replace(held, tensors=own), length)

    def aside(self) -> Any:
        return [part.aside() for part in self.parts]

    def put_back(self, held: Any) -> None:
        for part, own in zip(self.parts, held, strict=True):
            part.put_back(own)

    def copy_from(self, other: Any) -> None:
        for part, theirs in zip(self.parts, other.parts, strict=True):
            part.copy_from(theirs)
