"""Search for the layers that stay full: the set of every size under which a model's next-token
distributions stay closest to full attention's.

A set holds layer 0, which no selection precedes, and any others. Layers of the set attend to
everything; each other layer reads what the nearest one below it chose. The layers of a run 0, 1, ..
f are full because nothing precedes the first filter layer f: they cost as much as filter layers and
count as such.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.plan.layers import LayerPlan, layer_plan

Layers = tuple[int, ...]  # ascending, layer 0 among them

# share of the texts that every candidate is measured on, and share of the candidates that go on
FIRST, GO_ON = 0.5, 0.25


class Score(Protocol):
    """What a set of full layers costs, smaller is better."""

    def __call__(self, full: Layers, parent: Layers | None, texts: slice) -> list[float]:
        """Of each of these texts. parent: the set whose neighbour this one is, or None."""
        ...


def filters_of(full: Sequence[int]) -> Layers:
    """The filter layers under which exactly these layers are full: the set without the layers below
    the last of its run 0, 1, .. f.
    """
    first = next(i for i, layer in enumerate(full) if i + 1 == len(full) or full[i + 1] > layer + 1)
    return tuple(full[first:])


def seeing(layers: int, others: Sequence[int]) -> list[int]:
    """Of so many layers those that see everything; a search numbers these only."""
    return [layer for layer in range(layers) if layer not in others]


def plan_of(
    full: Sequence[int], layers: int, local: Sequence[int] = (), recurrent: Sequence[int] = ()
) -> LayerPlan:
    """The layer plan without wait layers under which exactly these layers are full. local,
    recurrent: the model's sliding-window and recurrent layers; `full` and `layers` number and count
    the others.
    """
    total = layers + len(local) + len(recurrent)
    numbers = seeing(total, (*local, *recurrent))
    filters = [numbers[i] for i in filters_of(full)]
    return layer_plan(total, filters, 0, local_layers=local, recurrent_layers=recurrent)


def full_layers(plan: LayerPlan) -> Layers:
    """The layers of a plan that attend to everything."""
    return tuple(i for i in range(plan.num_layers) if i not in plan.sparse_layers)


def even(layers: int, count: int) -> Layers:
    """`count` layers spread evenly: 0, then each as far from the one below."""
    return tuple(sorted({round(i * layers / count) for i in range(count)}))


@dataclass(frozen=True)
class Found:
    """The best set of its size: cost is the mean over the search texts."""

    full: Layers
    cost: float


class Search:
    """Finds a set for every size, one change at a time.

    score, texts: what a set costs on each of so many texts, the first half of which have every
    kind; tell: called with (moves measured, moves of this sweep, what is being done). known costs
    are kept in `costs` {set: cost of each text measured so far}: a search that is given them again
    measures none of them and finds the same.
    """

    def __init__(
        self,
        layers: int,
        score: Score,
        texts: int,
        tell: Callable[[int, int, str], None],
        costs: dict[Layers, list[float]] | None = None,
    ):
        self.layers, self.score, self.texts, self.tell = layers, score, texts, tell
        self.costs = {} if costs is None else costs
        self._ahead: list[int] = []  # sizes that are not begun
        self._size = 1

    # ---------------------------------------------------------------- what a set costs

    def cost(self, full: Layers, parent: Layers | None = None, texts: int | None = None) -> float:
        """Mean over the first `texts` texts (default all)."""
        texts = texts or self.texts
        known = self.costs.setdefault(full, [])
        if len(known) < texts:
            known.extend(self.score(full, parent, slice(len(known), texts)))
        return sum(known[:texts]) / texts

    def best(self, candidates: Iterable[Layers], parent: Layers, what: str) -> Found:
        """The cheapest of some neighbours of `parent`: all are measured on the first texts, the
        best quarter on all.
        """
        first = max(1, round(self.texts * FIRST))
        ranked = []
        candidates = sorted(set(candidates))
        for done, full in enumerate(candidates):
            self.tell(done, len(candidates), what)
            ranked.append((self.cost(full, parent, first), full))
        ranked.sort()
        kept = ranked[: max(2, round(len(ranked) * GO_ON))]
        cost, full = min((self.cost(full, parent), full) for _, full in kept)
        return Found(full, cost)

    # ---------------------------------------------------------------- moves

    def added(self, full: Layers) -> list[Layers]:
        """Every set with one more layer; the last layer lends to none and is left out."""
        return [tuple(sorted((*full, i))) for i in range(self.layers - 1) if i not in full]

    def removed(self, full: Layers) -> list[Layers]:
        """Every set with one layer less; layer 0 stays."""
        return [tuple(i for i in full if i != out) for out in full[1:]]

    def moved(self, full: Layers, which: int) -> list[Layers]:
        """Every set in which the layer at place `which` lies elsewhere between its neighbours."""
        above = (*full, self.layers - 1)[which + 1]
        others = full[:which] + full[which + 1 :]
        return [
            tuple(sorted((*others, i)))
            for i in range(full[which - 1] + 1, above)
            if i not in (full[which], *others)
        ]

    def settled(self, found: Found) -> Found:
        """Move one layer after the other, from the last on, to the best place between its
        neighbours. Once: the next size moves them all again.
        """
        self._size = len(found.full)
        for which in range(self._size - 1, 0, -1):
            moves = self.moved(found.full, which)
            if moves:
                what = f"{self._size} full layers: moving {found.full[which]}"
                other = self.best(moves, found.full, what)
                found = min(found, other, key=lambda f: (f.cost, f.full))
        return found

    def measurements(self, most: int, least: int = 2) -> float:
        """About how many texts a search down from `most` full layers measures."""
        self._size, self._ahead = most, list(range(least, most))
        return self.measurements_left() * 1.5  # the first size settles more than once

    def measurements_left(self) -> float:
        """Estimate the number of texts still to be measured."""

        def moves(size: int) -> int:
            full = even(self.layers, size)
            return sum(len(self.moved(full, which)) for which in range(1, size))

        # half of the moves of the size at hand; of those ahead all, and the choice that begins them
        candidates = moves(self._size) / 2
        candidates += sum(moves(size) + self.layers / 2 for size in self._ahead)
        return candidates * self.texts * (FIRST + (1 - FIRST) * GO_ON)

    def known(self, most: int, least: int = 2) -> dict[int, Found]:
        """{number of full layers: the best set measured on all texts}, whichever search met it."""
        found: dict[int, Found] = {}
        for full, costs in self.costs.items():
            if len(costs) == self.texts and least <= len(full) <= most:
                other = Found(full, sum(costs) / self.texts)
                best = found.get(len(full), other)
                found[len(full)] = min(best, other, key=lambda f: (f.cost, f.full))
        return found

    # ---------------------------------------------------------------- searches

    def down(self, most: int, least: int = 2) -> dict[int, Found]:
        """Return {number of full layers: the best set found}.

        The search spreads `most` layers evenly and settles them until none moves. Then it removes
        the layer that costs least and settles the others, again and again.
        """
        start = even(self.layers, most)
        self._ahead = list(range(least, most))
        best = self.settled(Found(start, self.cost(start)))
        # the others begin from this one: until nothing moves
        while (again := self.settled(best)) != best:
            best = again
        found = {most: best}
        for count in range(most - 1, least - 1, -1):
            full = found[count + 1].full
            self._ahead.remove(count)
            best = self.best(self.removed(full), full, f"{count} full layers: taking one away")
            found[count] = self.settled(best)
        return found

    def up(self, most: int, start: Layers = (0,), settle: bool = True) -> dict[int, Found]:
        """{number of full layers: the best set found}: from `start`, again and again the layer is
        added that helps most, and the set settled.
        """
        best, found = Found(start, self.cost(start)), {}
        self._ahead = list(range(len(start) + 1, most + 1))
        for count in range(len(start) + 1, most + 1):
            self._ahead.remove(count)
            what = f"{count} full layers: adding one"
            best = self.best(self.added(best.full), best.full, what)
            found[count] = best = self.settled(best) if settle else best
        return found
