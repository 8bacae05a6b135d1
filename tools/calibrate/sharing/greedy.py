"""How alike the lists of layers and heads are, and which share one.

Source: Wu et al., HShare, ICLR 2025, Algorithm 1, and its code (wuhuaijin/HShare, HShare_llama.py,
get_share_head): two lists are as alike as the part of the k tokens of most attention that is in
both, over queries; the most similar pairs share, greedily.
"""

from __future__ import annotations

import torch

from engine.bank.base import Step
from engine.methods.base import Runtime
from tools.calibrate.similarity import softmax_rows


class ListMeter:
    """Full attention that counts, step by step, how much of each list is in others of its layer
    and in those of the same head in the layers below.

    heads [L, Hkv, Hkv], layers [L, L] float64: sums over the steps of the shares, of `layers` also
    the mean over heads; below the diagonal alone (list i, list j < i). sinks and recent tokens are
    in no list.
    """

    def __init__(self, inner: Runtime, k: int, sinks: int, recent: int):
        config = inner.setup.config
        self.inner, self.k, self.sinks, self.recent = inner, k, sinks, recent
        self.count, self.steps = config.num_layers, 0
        many = config.num_kv_heads
        self.heads = torch.zeros(self.count, many, many, dtype=torch.float64)
        self.layers = torch.zeros(self.count, self.count, dtype=torch.float64)
        self._chosen: list[torch.Tensor] = []  # of each layer below: bool [Hkv, n]

    def attend(self, layer: int, q: torch.Tensor, step: Step) -> torch.Tensor:
        """Full attention of one layer; first notes what its heads would have read."""
        n, many = int(step.visible[0]), self.heads.shape[1]
        weights = softmax_rows(q[0, -1], step.bank, layer, n, self.inner.scale)
        mass = weights.view(many, -1, n).sum(1)[:, self.sinks : n - self.recent]
        kept = min(self.k, mass.shape[1])
        chosen = torch.zeros_like(mass, dtype=torch.bool)
        chosen.scatter_(1, mass.topk(kept, 1).indices, True)
        self._chosen = [*self._chosen[:layer], chosen]
        lists = chosen.double()
        self.heads[layer] += (lists @ lists.mT).tril(-1).cpu() / max(1, kept)
        for below, other in enumerate(self._chosen[:-1]):
            both = (chosen & other).sum(1).double().mean()
            self.layers[layer, below] += both.item() / max(1, kept)
        self.steps += layer == self.count - 1
        return self.inner.attend(layer, q, step)


def shared(alike: torch.Tensor, count: int) -> tuple[int, ...]:
    """For each of n lists the number of the one that is read: `count` of them read another, at
    most. alike [n, n]: what is below the diagonal says how alike list i is to j < i.

    The most similar pair is taken first: i reads j's list from then on, and so do those that read
    i's; i is in no later pair.
    """
    found, left = list(range(len(alike))), alike.double().tril(-1)
    for _ in range(count):
        place = int(left.argmax())
        reader, source = divmod(place, len(alike))
        if float(left[reader, source]) <= 0:
            break
        found = [source if one == reader else one for one in found]
        left[reader], left[:, reader] = 0.0, 0.0
    return tuple(found)
