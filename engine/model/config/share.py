"""The share of a model that one of several processes holds: whole attention heads, a part of every
MLP's width, and a part of the vocabulary (engine/model/share/). Or all weights, and the K and V of
its own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Part(NamedTuple):
    """The numbers `first` .. stop-1 of `of`."""

    first: int
    stop: int
    of: int

    @property
    def size(self) -> int:
        """How many they are."""
        return self.stop - self.first

    def times(self, factor: int) -> Part:
        """The same part where each number stands for `factor`."""
        return Part(*(factor * number for number in self))

    @property
    def range(self) -> tuple[int, int]:
        """(first, stop)."""
        return self.first, self.stop


@dataclass(frozen=True)
class Packed:
    """What a cut of columns heeds where matrices are stored in few bits: `group` columns lie under
    one scale and are not cut, `block` of them are stored together and best read so, and where they
    are `permuted` they lie in an order of their own (act-order).
    """

    group: int
    block: int
    permuted: bool = False


@dataclass(frozen=True)
class Share:
    """What rank `rank` of `ranks` holds: query heads, the K/V heads that they read (of layers that
    see everything, and of sliding ones where those have others), the width of an MLP, of an expert
    and of the expert that all tokens take, and tokens of the vocabulary. values, keys: heads of
    values of recurrent layers, and the heads of keys (Mamba-2: groups) that they read. output: the
    rows of attention's output projection, where its columns cannot be cut by heads; None: they are.
    """

    rank: int
    ranks: int
    heads: Part
    kv_heads: Part
    local_kv_heads: Part | None
    mlp: Part
    experts: Part | None
    shared: Part | None
    vocab: Part
    values: Part | None = None
    keys: Part | None = None
    output: Part | None = None


BLOCK = 64  # tokens in turn that one rank of a split by context holds
LANDING = 8  # tokens of a step whose rows wait to be taken to their ranks
EXCHANGED = 256  # queries of a chunk whose partial results the ranks exchange at a time


@dataclass(frozen=True)
class ContextShare:
    """The tokens whose K and V rank `rank` of `ranks` holds where a model is split by context:
    blocks of BLOCK positions go to the ranks in turn, so that no rank holds more than a block more
    than another, however long a session has become.

    A rank keeps the rows of its tokens in the order of their positions. So its row r is the (r+1)th
    of its tokens, and of equal scores the lowest row is the lowest position.
    """

    rank: int
    ranks: int

    def count(self, n: int) -> int:
        """How many of the positions below n it holds, which is the row of n where it holds that."""
        turns, rest = divmod(n, BLOCK * self.ranks)
        return turns * BLOCK + min(max(rest - self.rank * BLOCK, 0), BLOCK)

    def rows(self, capacity: int) -> int:
        """Rows that its bank reserves for sessions of so many tokens."""
        return max(1, self.count(capacity))

    def holds(self, position: int) -> bool:
        """Whether it holds a position."""
        return position // BLOCK % self.ranks == self.rank

    def held(self, positions: torch.Tensor) -> torch.Tensor:
        """Whether it holds each of `positions`: bool of its shape."""
        return positions // BLOCK % self.ranks == self.rank

    def positions(self, rows: torch.Tensor) -> torch.Tensor:
        """The positions of its rows, of the shape and dtype of `rows`."""
        return (rows // BLOCK * self.ranks + self.rank) * BLOCK + rows % BLOCK

    def rows_of(self, positions: torch.Tensor) -> torch.Tensor:
        """The rows of those of `positions`, [n], that it holds."""
        own = positions[self.held(positions)]
        return own // (BLOCK * self.ranks) * BLOCK + own % BLOCK

    def spans(self, first: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """Cut positions first .. stop-1 where it begins or ends to hold them: (first, stop, whether
        it does) of each run.
        """
        turn, begin = BLOCK * self.ranks, self.rank * BLOCK
        while first < stop:
            at, own = first % turn, self.holds(first)
            border = begin + BLOCK if own else begin if at < begin else begin + turn
            last = min(stop, first - at + border)
            yield first, last, own
            first = last
