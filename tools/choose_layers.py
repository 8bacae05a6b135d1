"""From the similarity of layers to filter layers: the best set for every number of filters and of
full layers, by dynamic programming.
"""

from dataclasses import dataclass

from engine.plan.layers import layer_plan


@dataclass(frozen=True)
class Choice:
    """A filter set: its layers, how many layers of the plan attend to everything, and the mean mass
    that its sparse layers see.
    """

    filters: tuple
    dense: int
    mass: float
    layers: int

    @property
    def sparse(self):
        """Number of sparse layers."""
        return self.layers - self.dense

    def bytes_per_step(self, n, k, tail, row):
        """KV bytes of a decode step at n tokens: row bytes per token and layer."""
        return row * (self.dense * n + self.sparse * min(n, k + tail))


def mean_mass(mass, filters, wait_layers):
    """Mean over the sparse layers of the mass they see under a filter set; 1.0 where there is none.
    mass [L][L], i < j.
    """
    plan = layer_plan(len(mass), filters, wait_layers)
    seen = [
        float(mass[group.filter_layer][layer]) for group in plan.groups for layer in group.layers
    ]
    return sum(seen) / len(seen) if seen else 1.0


def best_sets(mass, most_filters=3, wait_layers=1):
    """{(number of filters, full layers): Choice with the largest mass} over all filter sets,
    exactly.

    mass: [L][L] mean mass (tools/similarity.py). A table over (last filter, filters so far, full
    layers so far): a segment between two filters adds the mass that its sparse layers see, whatever
    came before, so the best prefix is enough. O(m L^3).
    """
    layers = len(mass)
    prefix = [[0.0] * (layers + 1) for _ in range(layers)]
    for i in range(layers):
        for j in range(layers):
            prefix[i][j + 1] = prefix[i][j] + (float(mass[i][j]) if j > i + wait_layers else 0.0)

    def segment(first, stop):
        """(mass seen, full layers) of a filter at `first` whose group ends before `stop`."""
        return prefix[first][stop], min(stop - first, 1 + wait_layers)

    best = {}
    # (last filter, count, full layers before it)
    open_sets = {(f, 1, f): (0.0, (f,)) for f in range(layers)}
    while open_sets:
        following = {}
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


def _keep(table, key, value, filters):
    """Keep the larger mass; of equal ones the set that comes first in order, so that the result is
    the same everywhere.
    """
    old = table.get(key)
    if old is None or value > old[0] + 1e-12 or (abs(value - old[0]) <= 1e-12 and filters < old[1]):
        table[key] = value, filters


def choose(sets, most_dense, slack=0.01):
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
