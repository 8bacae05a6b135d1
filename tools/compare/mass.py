"""How much attention a step's choice keeps, and how much its oracle would: the most that any choice
of as many rows, by as many lists, keeps of the same attention.

The oracle is taken of the very weights that the method is measured on, so that it differs by the
choice alone, and not by what earlier layers have made of the text. Rows of a tail count as any: the
oracle may have others in their place.
"""

from __future__ import annotations

import torch

from engine.methods.base import Runtime
from engine.methods.mass_meter import MassMeter, Watch


def most_kept(chosen: torch.Tensor, weights: torch.Tensor, start: int) -> float:
    """What the best lists of the same lengths keep of weights [H, n], mean over query heads.

    chosen [k] or [lists, k]: positions before `start`, -1 behind a shorter list's; the n - start
    others are every list's. A list serves as many query heads as another.
    """
    lists = chosen.unsqueeze(0) if chosen.dim() == 1 else chosen
    rows = (lists >= 0).sum(1, keepdim=True).to(weights.device) + weights.shape[1] - start
    sums = weights.double().view(len(lists), -1, weights.shape[1]).sum(1)
    best = sums.sort(1, descending=True).values.cumsum(1)
    return float(best.gather(1, rows - 1).sum()) / len(weights)


class BoundMeter(MassMeter):
    """most[layer]: what the oracle keeps, beside what the choice does (mass[layer])."""

    def __init__(self, inner: Runtime):
        super().__init__(inner)
        self.most: list[float] = []

    def kept(self, chosen: torch.Tensor, weights: torch.Tensor, start: int) -> float:
        self.most.append(most_kept(chosen, weights, start))
        return super().kept(chosen, weights, start)


class BoundWatch(Watch):
    """Meters every step and sums the attention kept, layer by layer, and what the oracles keep."""

    def __init__(self) -> None:
        super().__init__(every=1)
        self.sums: dict[int, float] = {}
        self.most: dict[int, float] = {}
        self._meter: BoundMeter | None = None

    def meter(self, runtime: Runtime) -> BoundMeter:
        """As Watch.meter."""
        self._meter = BoundMeter(runtime)
        return self._meter

    def saw(self, mass: dict[int, float]) -> None:
        """Add a step's masses."""
        super().saw(mass)
        assert self._meter is not None
        for (layer, kept), most in zip(mass.items(), self._meter.most):
            self.sums[layer] = self.sums.get(layer, 0.0) + kept
            self.most[layer] = self.most.get(layer, 0.0) + most
