"""Earlier states of a session's recurrent layers, so that it can go back without reading all of its
tokens again: the newest ones close together, older ones further apart.

A recurrent state cannot be cut at a position. Going back to n tokens means standing at the nearest
savepoint before n and running the recurrent layers over the tokens since. When there is no room for
another savepoint, the one goes whose loss costs least: the distance between its neighbours, as a
share of how far back they lie. So the tokens that are run again are a share of the tokens that were
taken back, and never many times as many.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

SPACING = 64  # tokens between two savepoints, at least, where no prompt begins or ends
WEIGHT = 4.0  # of a savepoint where a prompt begins or ends: sessions go back to those most


@dataclass(frozen=True)
class Snapshot:
    """A state after `length` tokens, whose S holds `base` of them: it serves every length from
    base + 1 on.

    tensors, on the CPU: S, inputs of the convolution, keys, deltas and decays of all layers. turn:
    whether a prompt begins or ends here. queries: the newest ones before rotation up to position
    `end`, where the method reads some, as QueryRing.newest gives them.
    """

    base: int
    length: int
    tensors: tuple[torch.Tensor, ...] = field(repr=False)
    turn: bool = False
    queries: torch.Tensor | None = field(repr=False, default=None)
    end: int = 0

    def cut(self, n: int) -> Snapshot:
        """Return the state at n tokens, more than `base`, where this one has taken more."""
        if n >= self.length:
            return self
        gone, (states, inputs, *rows) = self.length - n, self.tensors
        kept = [inputs[:, :, :-gone], *(t[:, :, :, :-gone] for t in rows)]
        tensors = states, *(t.contiguous() for t in kept)
        return replace(self, length=n, tensors=tensors, turn=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        more = 0 if self.queries is None else self.queries.nbytes
        return sum(t.nbytes for t in self.tensors) + more


class Savepoints:
    """The savepoints of one session, oldest first, at most `most` of them (0: there are none)."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.points: list[Snapshot] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(point.nbytes for point in self.points)

    def due(self, length: int, turn: bool) -> bool:
        """Say whether a savepoint at `length` is wanted: far enough from the newest one, or where a
        prompt begins or ends.
        """
        newest = self.points[-1].length if self.points else 0
        return self.most > 0 and (length > newest if turn else length >= newest + SPACING)

    def add(self, point: Snapshot) -> None:
        """Keep a savepoint, after all others; drop one if there are too many."""
        points = [*self.points, point]
        if len(points) > self.most:
            del points[cheapest([(each.length, each.turn) for each in points])]
        self.points = points

    def best(self, n: int) -> Snapshot | None:
        """Return the savepoint that serves the greatest length up to n; None: none does."""
        return max(
            (point for point in self.points if point.base < n),
            key=lambda point: min(point.length, n),
            default=None,
        )

    def reach(self, n: int) -> int:
        """Return the greatest length up to n that a savepoint serves; 0: the beginning."""
        point = self.best(n)
        return 0 if point is None else min(point.length, n)

    def cut(self, n: int) -> None:
        """Forget what came after n tokens."""
        self.points = [point.cut(n) for point in self.points if point.base < n]

    def keep(self, points: list[Snapshot]) -> None:
        """Replace the savepoints: by the newest of these, as many as there is room for."""
        self.points = points[-self.most :] if self.most else []

    def copy_from(self, other: Savepoints) -> None:
        """Keep another session's savepoints (fork): the tensors are never written to."""
        self.keep(other.points)


def cheapest(points: list[tuple[int, bool]]) -> int:
    """Return which of the points (length, turn) to drop; never the newest one, which others are
    measured from.
    """
    now = points[-1][0]

    def cost(i: int) -> float:
        before = points[i - 1][0] if i else 0
        far = now - before
        gap = points[i + 1][0] - before
        return gap / max(1, far) * (WEIGHT if points[i][1] else 1.0)

    return min(range(len(points) - 1), key=cost, default=0)
