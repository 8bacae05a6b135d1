"""The share of a model that one of several processes holds: whole attention heads, a part of every
MLP's width, and a part of the vocabulary (engine/model/share/).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
class Share:
    """What rank `rank` of `ranks` holds: query heads, the K/V heads that they read (of layers that
    see everything, and of sliding ones where those have others), the width of an MLP, of an expert
    and of the expert that all tokens take, and tokens of the vocabulary.
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
