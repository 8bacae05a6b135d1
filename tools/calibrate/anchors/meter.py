"""How much of what each K/V head would choose it finds in the choice of each head of each layer
below.

Source: Kascade (Deshmukh et al., 2025) and microsoft/kascade (stats_runner.py): of one query, the
mass of a head's attention (summed over its group's softmax) on the top k of another layer's head,
as a share of the mass on its own top k; of a text the least over its positions.
"""

from __future__ import annotations

import torch

from engine.bank.base import Step
from engine.methods.base import Runtime
from tools.calibrate.choose_layers import best_sets
from tools.calibrate.similarity import softmax_rows


class HeadMeter:
    """Full attention that records, layer by layer of one step, what the heads below would have
    found for each head. least [L, L, Hkv, Hkv] float64: least[i, j, h, a] is the least share, over
    the steps seen, for head h of layer j in the choice of head a of layer i (i <= j; else 0).
    """

    def __init__(self, inner: Runtime, k: int):
        config = inner.setup.config
        self.inner, self.k, self.layers, self.steps = inner, k, config.num_layers, 0
        heads = config.num_kv_heads
        least = torch.full((self.layers, self.layers, heads, heads), float("inf"))
        self.least = least.double()
        self._chosen: list[torch.Tensor] = []  # of each layer: [Hkv, k]

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Full attention of one layer; first notes what its heads find in the choices below."""
        n, heads = int(step.visible[0]), self.least.shape[2]
        weights = softmax_rows(q[0, -1], step.bank, layer, n, self.inner.scale)
        mass = weights.view(heads, -1, n).sum(1)
        own, chosen = mass.topk(min(self.k, n), 1)
        self._chosen = [*self._chosen[:layer], chosen]
        for below, rows in enumerate(self._chosen):
            found = mass[:, rows].sum(-1) / own.sum(-1, keepdim=True)  # [h, a]
            kept = self.least[below, layer]
            torch.minimum(kept, found.double().cpu(), out=kept)
        self.steps += layer == self.layers - 1
        return self.inner.attend(layer, q, step)

    def shares(self) -> torch.Tensor:
        """The least shares of the steps seen, zero where there are none."""
        return self.least.masked_fill(self.least.isinf(), 0.0)


def anchors_of(shares: torch.Tensor, count: int) -> tuple[int, ...]:
    """The `count` anchors, layer 0 first, under which the layers find most: by dynamic programming
    over the mean, over a layer's heads, of the best head below. shares: [L, L, Hkv, Hkv].
    """
    best = shares.amax(-1).mean(-1)
    # layer 0 is a filter where no layer before the first one is full
    return best_sets(best.tolist(), count)[count, count].filters


def map_of(shares: torch.Tensor, anchors: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """[layer][K/V head]: the anchor's head whose choice serves it best, of equals the first; an
    anchor's own are its own.
    """
    layers, heads = shares.shape[1:3]
    rows = []
    for layer in range(layers):
        anchor = max(a for a in anchors if a <= layer)
        own = tuple(range(heads))
        rows.append(own if anchor == layer else tuple(shares[anchor, layer].argmax(-1).tolist()))
    return tuple(rows)
