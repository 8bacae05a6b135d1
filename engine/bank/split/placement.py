"""What lives in host memory of a bank over several devices."""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan.placement import Placement


@dataclass(frozen=True)
class SplitPlacement:
    """The placement of each part's bank, whose layers are numbered from 0; None: all of it is on
    its device. starts: the first layer of each part, and the number of layers.
    """

    parts: tuple[Placement | None, ...]
    starts: tuple[int, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers in host memory, by their numbers among all."""
        placed = zip(self.parts, self.starts)
        return tuple(first + i for one, first in placed if one is not None for i in one.layers)

    @property
    def reuse(self) -> bool:
        """Whether slots survive a step, in all parts that have any."""
        return all(part.reuse for part in self.parts if part is not None)
