"""Evicting methods on models with sliding windows, simulated densely in float64.

A rule's masks act in the layers that see every token. A layer that slides sees the newest tokens of
its window, whatever the rule: it drops nothing and scores nothing.
"""

from dataclasses import replace

import numpy as np

from tests.engine.methods.evicting_simulation import Conversation
from tests.engine.methods.newer_simulation import NewConversation
from tests.engine.methods.official_simulation import Model


class Sliding:
    """Before a Conversation's class: layers with a window in `windows` (0: none) slide.

    theta: base of the rope of those. cap: on the logits of all layers, 0: none. sinks: of each
    layer [H], a logit that counts in a query's softmax and brings nothing; (): there are none.
    """

    def __init__(self, model, rule, windows, theta, cap=0.0, sinks=()):
        self.cap, self.sinks = cap, sinks
        self.windows, self.local = windows, Model(replace(model.shape, theta=theta), {})
        super().__init__(model, rule)

    def _logits(self, layer, q, at):
        found = self._windowed(layer, q, at)
        if not self.cap:
            return found
        return np.where(np.isinf(found), found, self.cap * np.tanh(found / self.cap))

    def _weights(self, layer, logits, tau=1.0):
        if not len(self.sinks):
            return super()._weights(layer, logits, tau)
        sinks = np.broadcast_to(self.sinks[layer][:, None, None], (*logits.shape[:2], 1))
        return super()._weights(layer, np.concatenate([logits, sinks], -1), tau)[..., :-1]

    def _windowed(self, layer, q, at):
        if not self.windows[layer]:
            return super()._logits(layer, q, at)
        model, keys = self.local, np.repeat(self.keys[layer], self.group, axis=1)
        there = np.arange(len(keys))
        ages = at[:, None] - there
        found = model.rotate(q, at).transpose(1, 0, 2) @ model.rotate(keys, there).transpose(
            1, 2, 0
        )
        seen = (ages >= 0) & (ages < self.windows[layer])
        return np.where(seen, found / np.sqrt(model.shape.head_dim), -np.inf)

    def _heavy(self, layer, budget):
        if not self.windows[layer]:
            super()._heavy(layer, budget)

    def _snap(self, layer):
        if not self.windows[layer]:
            super()._snap(layer)

    def kept(self, layer):
        if not self.windows[layer]:
            return super().kept(layer)
        n = len(self.keys[layer])
        return [list(range(max(0, n - self.windows[layer]), n))] * len(self.alive[layer])


class WindowedConversation(Sliding, Conversation):
    """A Conversation with a model some of whose layers slide."""


class NewWindowedConversation(Sliding, NewConversation):
    """A NewConversation with such a model."""

    def _cut(self, layer, budget):
        if not self.windows[layer]:
            super()._cut(layer, budget)
