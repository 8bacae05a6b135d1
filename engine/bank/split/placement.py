"""What lives in host memory of a bank over several devices."""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan.placement import Placement


@dataclass(frozen=True)
class SplitPlacement:
    """The placement of each part's bank, whose layers are numbered from 0; None: all of it is on
    its device.
    """

    parts: tuple[Placement | None, ...]

    @property
    def reuse(self) -> bool:
        """Whether slots survive a step, in all parts that have any."""
        return all(part.reuse for part in self.parts if part is not None)
