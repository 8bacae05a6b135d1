"""Which rows and columns of a stored matrix a process reads: runs of neighbours, in whole units of
what is packed together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from weights.checkpoint import Cut, Rows

Runs = tuple[tuple[int, int], ...]  # (first, one past the last), ascending and apart
Wanted = range | torch.Tensor  # numbers of rows or columns, in the order in which they are wanted
MOST_RUNS = 256  # of one matrix; what is torn into more is read from its first to its last


class Window(NamedTuple):
    """What is read of a matrix [O, I]. shape: (O, I). rows: runs of its rows. inputs: runs of its
    columns, as they are stored. columns: (left, right) of them in the order of their groups, which
    is the stored one but in act-order.
    """

    shape: tuple[int, int]
    rows: Runs
    inputs: Runs
    columns: tuple[int, int]

    @classmethod
    def of(cls, shape: tuple[int, int]) -> Window:
        """All of a matrix."""
        return cls(shape, ((0, shape[0]),), ((0, shape[1]),), (0, shape[1]))

    @property
    def own(self) -> tuple[int, int]:
        """(rows, columns) that it has."""
        return length(self.rows), self.columns[1] - self.columns[0]

    @property
    def all_columns(self) -> bool:
        """Whether it has every column."""
        return self.columns == (0, self.shape[1])


def length(runs: Runs) -> int:
    """How many numbers the runs have."""
    return sum(stop - first for first, stop in runs)


def numbers_of(runs: Runs) -> torch.Tensor:
    """Those numbers: int64."""
    return torch.cat([torch.arange(first, stop) for first, stop in runs])


def divided(runs: Runs, per: int) -> Runs:
    """The entries that hold the numbers of some runs, where an entry holds `per` of them."""
    return tuple((first // per, -(-stop // per)) for first, stop in runs)


def runs_of(wanted: Wanted, of: int, unit: int = 1) -> Runs:
    """Runs of whole units that hold the `wanted` numbers below `of`; a last unit may be short."""
    if isinstance(wanted, range):
        return ((wanted.start // unit * unit, min(of, -(-wanted.stop // unit) * unit)),)
    units = torch.unique(wanted // unit)
    breaks = (torch.where(units[1:] - units[:-1] > 1)[0] + 1).tolist()
    if len(breaks) >= MOST_RUNS:
        breaks = []
    ends = [0, *breaks, len(units)]
    return tuple(
        (int(units[a]) * unit, min(of, (int(units[b - 1]) + 1) * unit))
        for a, b in zip(ends, ends[1:])
    )


def places_in(runs: Runs, wanted: Wanted) -> slice | torch.Tensor:
    """Where the `wanted` numbers stand in what was read of `runs`."""
    if isinstance(wanted, range):
        first = runs[0][0]
        return slice(wanted.start - first, wanted.stop - first)
    starts = torch.tensor([first for first, _ in runs])
    before = torch.tensor([0, *(stop - first for first, stop in runs)])[:-1].cumsum(0)
    run = torch.searchsorted(starts, wanted, right=True) - 1
    return wanted - starts[run] + before[run]


def wanted_rows(
    count: int, some: Rows | None, cut: Cut | None, order: torch.Tensor | None = None
) -> Wanted:
    """The stored rows of a part, of `count` rows: those of `some`, and of these a `cut`'s. order:
    the rows of each of its sections of so many, in the order in which a cut counts them.
    """
    whole = range(count) if some is None else some.numbers
    wanted = whole if cut is None else whole[cut.first : cut.stop]
    if order is None or cut is None:
        return wanted
    assert isinstance(wanted, range)
    section, first = divmod(cut.first, len(order))
    return section * len(order) + order[first : first + cut.stop - cut.first]


def common(units: Iterable[int]) -> int:
    """The least number that all of them divide."""
    return math.lcm(*units)
