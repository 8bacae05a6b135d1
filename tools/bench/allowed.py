"""What the bytes of a method allow: a step costs its fixed part, which is that of full attention
over a few tokens, and then a price for each byte of K and V. Two prices stand side by side.

Beside OmniKV's step a byte costs what OmniKV pays. That holds for methods that read about as much:
few bytes stay in the processor's last cache, and many come from memory. At a method's own size the
price is of our own full attention over as many bytes, timed in turns with it: so 1.0 is as fast as
full attention would be over a bank of these bytes. It is measured at a ladder of depths
(`ladder`), between two of which seconds lie on a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tools.bench.run import Cell

SHALLOW = 64  # tokens at which full attention's step is its fixed part: weights and calls
FIXED = "fixed part"  # the row of full attention at that depth
RUNG = "full at "  # the rows of full attention at other depths, by their tokens
PARTS = (16, 8, 4, 2)  # of a depth


def ladder(n: int) -> list[int]:
    """Depths in tokens, below n and ascending, at which full attention is timed for the price of a
    byte at n: beside these it is timed at n, and at SHALLOW.
    """
    return sorted({n // part for part in PARTS if n // part > SHALLOW})


@dataclass(frozen=True)
class Allowed:
    """One method at n tokens. read: bytes of K and V, or of what stands for them, that a step
    reads, `choosing` of them to choose; seconds a step, those that its bytes allow beside OmniKV,
    and those that our full attention takes over as many bytes (None: fewer than two depths of it
    were timed).
    """

    name: str
    n: int
    read: int
    choosing: int
    seconds: float
    allowed: float
    alike: float | None

    @property
    def ratio(self) -> float:
        """How many times what its bytes allow beside OmniKV a step takes."""
        return self.seconds / self.allowed

    @property
    def own(self) -> float | None:
        """How many times what full attention takes over as many bytes a step takes."""
        return None if self.alike is None else self.seconds / self.alike


def allowed(cells: Sequence[Cell]) -> list[Allowed]:
    """What each method's bytes allow, depth by depth; empty where the fixed part or OmniKV was not
    timed beside it.
    """
    found: list[Allowed] = []
    timed = [cell for cell in cells if cell.test == "tg" and cell.seconds and cell.needed]
    fixed = next((cell for cell in timed if cell.name == FIXED), None)
    rungs = _rungs(timed)
    for base in _bases(timed):
        if fixed is None or base.needed.read <= fixed.needed.read:
            continue
        byte = (base.median - fixed.median) / (base.needed.read - fixed.needed.read)
        for cell in timed:
            if cell.n != base.n or cell is fixed or cell.name.startswith(RUNG):
                continue
            more = byte * (cell.needed.read - fixed.needed.read)
            sizes = cell.needed.read, cell.needed.choosing
            times = cell.median, fixed.median + more, _between(rungs, cell.needed.read)
            found.append(Allowed(cell.name, cell.n, *sizes, *times))
    return found


def _bases(timed: Sequence[Cell]) -> list[Cell]:
    """OmniKV's first row of each depth: with everything on the device."""
    rows: dict[int, Cell] = {}
    for cell in timed:
        if cell.name.startswith("omnikv w"):
            rows.setdefault(cell.n, cell)
    return list(rows.values())


def _rungs(timed: Sequence[Cell]) -> list[tuple[int, float]]:
    """(bytes, seconds) of full attention at every depth, ascending; where a depth was timed twice,
    the mean.
    """
    found: dict[int, list[float]] = {}
    for cell in timed:
        if cell.name in (FIXED, "full") or cell.name.startswith(RUNG):
            found.setdefault(cell.needed.read, []).append(cell.median)
    return sorted((read, sum(times) / len(times)) for read, times in found.items())


def _between(rungs: Sequence[tuple[int, float]], read: int) -> float | None:
    """Seconds at so many bytes: on the line through the two rungs around them, or through the last
    two.
    """
    if len(rungs) < 2:
        return None
    pairs = list(pairwise(rungs))
    low, high = next((pair for pair in pairs if read <= pair[1][0]), pairs[-1])
    return low[1] + (high[1] - low[1]) * (read - low[0]) / (high[0] - low[0])
