"""KVzip simulated densely in float64 (evicting_simulation.py): restated from what docs/METHODS.md
says of its source, with every token's keys and values and a mask of those that are left.
"""

from dataclasses import dataclass

import numpy as np

from tests.engine.methods.evicting_simulation import Conversation, Rule
from tests.engine.methods.official_simulation import softmax


@dataclass(frozen=True)
class ZipRule(Rule):
    """share: of all tokens so far; across: over what scores are ranked; chunk, least: tokens. own:
    score by the attention of the prompt's own queries as it is read, and repeat nothing.
    """

    share: float = 1.0
    across: str = "all"
    chunk: int = 2048
    least: int = 1
    own: bool = False


class ZipConversation(Conversation):
    """As Conversation. requests: ids of the first request to repeat, and of later ones."""

    def __init__(self, model, rule, requests=((), ())):
        super().__init__(model, rule)
        self.requests, self.scored = requests, [None] * model.shape.layers
        self.seen = [np.zeros((model.shape.kv_heads, 0)) for _ in range(model.shape.layers)]
        self.ids, self.cuts = [], 0

    def prompt(self, ids):
        """Read, and then repeat and cut unless this is a question."""
        self.ids += ids
        logits = self._forward(ids)
        if not self.cuts or len(ids) >= self.rule.least:
            self._zip()
        return logits

    def step(self, token):
        self.ids.append(token)
        return self._forward([token])

    def _added(self, layer, logits, weights):
        """The largest weight that any query gave, while reading."""
        largest = weights.reshape(-1, self.group, *weights.shape[1:]).max((1, 2))
        old, self.seen[layer] = self.seen[layer], largest
        self.seen[layer][:, : old.shape[1]] = np.maximum(old, largest[:, : old.shape[1]])
        return 0.0

    def _zip(self):
        n, layers = len(self.ids), range(self.model.shape.layers)
        known = self.scored[0].shape[1] if self.cuts else 0
        first = min(n, max(known, self.rule.sink))
        new = [np.zeros((self.model.shape.kv_heads, n)) for _ in layers]
        for layer in layers:
            new[layer][:, :known] = self.scored[layer] if self.cuts else 0.0
        for at in range(first, n, self.rule.chunk):
            self._repeat(at, min(n, at + self.rule.chunk), at == first and not self.cuts, new)
        if self.rule.own:
            new = [seen.copy() for seen in self.seen]
        self.scored = new
        self.cuts += 1
        self._cut([np.where(np.arange(n) < self.rule.sink, np.inf, t) for t in new])

    def _repeat(self, first, stop, whole, found):
        """Run the tokens first .. stop-1 behind everything."""
        model, n = self.model, len(self.ids)
        request = list(self.requests[not whole])
        if not whole:
            request += self.ids[max(0, first - 8) : first]
        ids = request + self.ids[first:stop]
        at = n + np.arange(len(ids))
        x = model.weights["model.embed_tokens.weight"][ids]
        sink, causal = np.arange(min(self.rule.sink, n)), np.tri(len(ids), dtype=bool)
        for layer in range(model.shape.layers):
            normed = model.norm(x, f"model.layers.{layer}.input_layernorm.weight")
            q, k, v = (model.project(layer, part, normed) for part in "qkv")
            own = model.rotate(q, at).transpose(1, 0, 2) @ np.repeat(
                model.rotate(k, at), self.group, axis=1
            ).transpose(1, 2, 0)
            own = np.where(causal, own / np.sqrt(model.shape.head_dim), -np.inf)
            held = self._logits(layer, q, at)
            weights = softmax(np.concatenate([held, own], -1))
            values = np.concatenate([self.values[layer], v])
            values = np.repeat(values, self.group, axis=1).transpose(1, 0, 2)
            x = model.rest(layer, x, (weights @ values).transpose(1, 0, 2).reshape(len(ids), -1))
            some = np.concatenate([held[:, :, sink], held[:, :, first:stop], own], -1)
            some = softmax(some)[:, :, len(sink) : len(sink) + stop - first]
            found[layer][:, first:stop] = some.reshape(-1, self.group, *some.shape[1:]).max((1, 2))

    def _cut(self, scores):
        budget = max(self.rule.sink, int(self.rule.share * len(self.ids)), 1)
        heads = [
            (layer, head) for layer in range(len(scores)) for head in range(len(scores[layer]))
        ]
        if self.rule.across == "all":
            pools = [heads]
        elif self.rule.across == "layer":
            pools = [[one for one in heads if one[0] == layer] for layer in range(len(scores))]
        else:
            pools = [[one] for one in heads]
        for pool in pools:
            ranked = sorted(
                (
                    (scores[layer][head, at], at, layer, head)
                    for layer, head in pool
                    for at in np.flatnonzero(self.alive[layer][head])
                ),
                reverse=True,
            )
            for _, at, layer, head in ranked[budget * len(pool) :]:
                self.alive[layer][head, at] = False
