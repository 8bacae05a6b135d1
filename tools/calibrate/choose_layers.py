"""From the similarity of layers to filter layers: the best set for every number of filters and of
full layers, by dynamic programming.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.plan.layers import layer_plan

Matrix = Sequence[Sequence[float]] | torch.Tensor  # [L][L]
Sets = dict[tuple[int, int], "Choice"]  # by (number of filters, full layers)


@dataclass(frozen=True)
class Choice:
    """A filter set. dense: layers of its plan that attend to everything; mass: the mean mass that
    its sparse layers see.
    """

    filters: tuple[int, ...]
    dense: int
    mass: float
    layers: int

    @property
    def sparse(self) -> int:
        """Number of sparse layers."""
        return self.layers - self.dense

    def bytes_per_step(self, n: int, k: int, tail: int, row: int) -> int:
        """KV bytes of a decode step at n tokens: row bytes per token and layer."""
        return row * (self.dense * n + self.sparse * min(n, k + tail))


def mean_mass(mass: Matrix, filters: Sequence[int], wait_layers: int) -> float:
    """Mean over the sparse layers of the mass that they see under a filter set; 1.0 without sparse
    layers. mass [L][L], i < j.
    """
    plan = layer_plan(len(mass), filters, wait_layers)
    seen = [
        float(mass[group.filter_layer][layer]) for group in plan.groups for layer in group.layers
    ]
    return sum(seen) / len(seen) if seen else 1.0


def best_sets(mass: Matrix, most_filters: int = 3, wait_layers: int = 0) -> Sets:
    """{(number of filters, full layers): Choice with the largest mass} over all filter sets, by
    dynamic programming, exactly.

    mass: [L][L] mean mass (tools/calibrate/similarity.py). A table over (last filter, filters so
    far, full layers so far): a segment between two filters adds the mass that its sparse layers
    see, whatever came before, so the best prefix is enough. O(m L^3).
    """
    layers = len(mass)
    prefix = [[0.0] * (layers + 1) for _ in range(layers)]
    for i in range(layers):
        for j in range(layers):
            prefix[i][j + 1] = prefix[i][j] + (float(mass[i][j]) if j > i + wait_layers else 0.0)

    def segment(first: int, stop: int) -> tuple[float, int]:
        """(mass seen, full layers) of a filter at `first` whose group ends before `stop`."""
        return prefix[first][stop], min(stop - first, 1 + wait_layers)

    best: dict = {}
    # (last filter, count, full layers before it)
    open_sets = {(f, 1, f): (0.0, (f,)) for f in range(layers)}
    while open_sets:
        following: dict = {}
        for (last, count, dense), (value, filters) in open_sets.items():
            gain, full = segment(last, layers)
            _keep(best, (count, dense + full), value + gain, filters)
            if count == most_filters:
                continue
            for f in range(last + 1, layers):
                gain, full = segment(last, f)
                _keep(following, (f, count + 1, dense + full), value + gain, (*filters, f))
        open_sets = following
    found = {}
    for (count, dense), (value, filters) in best.items():
        if dense < layers:
            found[count, dense] = Choice(filters, dense, value / (layers - dense), layers)
    return found


def _keep(table: dict, key: tuple, value: float, filters: tuple[int, ...]) -> None:
    """Keep the larger mass; of equal ones the set that comes first in order, so that the result is
    the same everywhere.
    """
    old = table.get(key)
    if old is None or value > old[0] + 1e-12 or (abs(value - old[0]) <= 1e-12 and filters < old[1]):
        table[key] = value, filters


def choose(sets: Sets, most_dense: int, slack: float = 0.01) -> Choice | None:
    """The set to use: among those with at most `most_dense` full layers, the fewest full layers
    within `slack` of the best mass.
    """
    allowed = [c for c in sets.values() if c.dense <= most_dense]
    if not allowed:
        return None
    bar = max(c.mass for c in allowed) - slack
    return min(
        (c for c in allowed if c.mass >= bar), key=lambda c: (c.dense, -c.mass, len(c.filters))
    )
