"""What a set of full layers costs several passages, and what it saves: the score of a search."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from engine.calibration.passages import Passage, Trace
from engine.calibration.search import Layers, plan_of


class Passages:
    """The search's score over several passages, which are made when one is first asked for; the
    traces of one parent are kept at a time.
    """

    def __init__(
        self,
        make: Callable[[], Sequence[Passage]],
        layers: int,
        local: Sequence[int] = (),
        recurrent: Sequence[int] = (),
    ):
        self._make, self.layers = make, layers
        self.plan_of = partial(plan_of, layers=layers, local=local, recurrent=recurrent)
        self.passages: Sequence[Passage] = ()
        self.measured, self.seconds = 0, 0.0
        self._parent: Layers | None = None
        self._traces: dict[int, Trace] = {}

    def __call__(self, full: Layers, parent: Layers | None, texts: slice) -> list[float]:
        """Mean KL of each of these texts, nats."""
        self.passages = self.passages or self._make()
        found, plan, began = [], self.plan_of(full), time.perf_counter()
        for number in range(*texts.indices(len(self.passages))):
            trace = self.passages[number].run(plan, self._trace(number, parent))
            found.append(float(trace.kl.mean()))
            self.measured += 1
        self.seconds += time.perf_counter() - began
        return found

    def _trace(self, number: int, parent: Layers | None) -> Trace | None:
        if parent is None:
            return None
        if parent != self._parent:
            self._parent, self._traces = parent, {}
        if number not in self._traces:
            plan = self.plan_of(parent)
            self._traces[number] = self.passages[number].run(plan, keep=True)
        return self._traces[number]


def bytes_share(full: int, layers: int, share: float) -> float:
    """KV bytes of a step as a share of full attention's, the tail left out."""
    return (full + (layers - full) * share) / layers


def worth(cost: float, full: int, layers: int, share: float) -> float:
    """A set's cost times the bytes of a step under it: where this is least, more full layers cost
    more than they bring.
    """
    return cost * bytes_share(full, layers, share)
