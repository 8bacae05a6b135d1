"""What the bytes of a method allow beside OmniKV's step: a step costs its fixed part, which is that
of full attention over a few tokens, and then as much for a byte of K and V as OmniKV pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tools.bench.run import Cell

SHALLOW = 64  # tokens at which full attention's step is its fixed part: weights and calls
FIXED = "fixed part"  # the row of full attention at that depth


@dataclass(frozen=True)
class Allowed:
    """One method at n tokens. read: bytes of K and V, or of what stands for them, that a step
    reads, `choosing` of them to choose; seconds a step, and those that its bytes allow.
    """

    name: str
    n: int
    read: int
    choosing: int
    seconds: float
    allowed: float

    @property
    def ratio(self) -> float:
        """How many times what its bytes allow a step takes."""
        return self.seconds / self.allowed


def allowed(cells: Sequence[Cell]) -> list[Allowed]:
    """What each method's bytes allow, depth by depth; empty where the fixed part or OmniKV was not
    timed beside it.
    """
    found: list[Allowed] = []
    timed = [cell for cell in cells if cell.test == "tg" and cell.seconds and cell.needed]
    fixed = next((cell for cell in timed if cell.name == FIXED), None)
    for base in _bases(timed):
        if fixed is None or base.needed.read <= fixed.needed.read:
            continue
        byte = (base.median - fixed.median) / (base.needed.read - fixed.needed.read)
        for cell in timed:
            if cell.n != base.n or cell is fixed:
                continue
            more = byte * (cell.needed.read - fixed.needed.read)
            sizes = cell.needed.read, cell.needed.choosing
            found.append(Allowed(cell.name, cell.n, *sizes, cell.median, fixed.median + more))
    return found


def _bases(timed: Sequence[Cell]) -> list[Cell]:
    """OmniKV's first row of each depth: with everything on the device."""
    rows: dict[int, Cell] = {}
    for cell in timed:
        if cell.name.startswith("omnikv w"):
            rows.setdefault(cell.n, cell)
    return list(rows.values())
