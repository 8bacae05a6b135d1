"""OmniKV Eq. 1-4 with this engine's candidates and tail, simulated in float64: the oracle of the
selector's tests.

The forward pass is official_simulation.Model's; nothing of the engine is used. The rule (the OmniKV
paper, Eq. 1-4): S[i] = sum over the last W queries j of alpha_j * max over heads of
A_j[i], where A_j is the softmax over every key that query j sees (or the raw logit), each query
rotated to its own position; T = the k largest of the positions before the tail.
"""

from dataclasses import dataclass

import numpy as np

from tests.engine.methods.official_simulation import Choice, softmax, source_of, top


@dataclass(frozen=True)
class Rule:
    """Settings of OmniKV as far as they decide what is read; `k` is the budget in tokens."""

    filters: tuple
    k: int
    wait: int = 1
    selector: str = "last"
    raw: bool = False
    window: int = 16
    tail: int = 256
    sink: int = 0

    def weights(self, count):
        """alpha of `count` queries, newest last."""
        if self.selector == "last":
            return np.ones(1)
        return np.ones(count) if self.selector == "uniform" else 0.5 ** np.arange(count)[::-1]

    def tail_start(self, n):
        """First position that every layer sees."""
        return max(0, n // 64 * 64 - self.tail)


class Conversation:
    """One sequence: `prompt` appends tokens under full attention, `step` one under the rule."""

    def __init__(self, model, rule):
        self.model = model
        shape = model.shape
        self.keys = [np.zeros((0, shape.kv_heads, shape.head_dim)) for _ in range(shape.layers)]
        self.values = [k.copy() for k in self.keys]
        # each at its own position
        self.queries = [np.zeros((0, shape.heads, shape.head_dim)) for _ in range(shape.layers)]
        self.use(rule)

    def use(self, rule):
        """Go on under another rule; no filters means full attention."""
        self.rule, self.source = rule, source_of(self.model.shape.layers, rule.filters, rule.wait)

    def __len__(self):
        return len(self.keys[0])

    def _append(self, layer, x):
        """Rows and queries of new hidden states."""
        model = self.model
        normed = model.norm(x, f"model.layers.{layer}.input_layernorm.weight")
        positions = np.arange(len(x)) + len(self.keys[layer])
        q, k = (model.rotate(model.project(layer, part, normed), positions) for part in ("q", "k"))
        self.queries[layer] = np.concatenate([self.queries[layer], q])
        self.keys[layer] = np.concatenate([self.keys[layer], k])
        self.values[layer] = np.concatenate([self.values[layer], model.project(layer, "v", normed)])
        return q

    def prompt(self, ids):
        """Full attention in every layer; logits of the last token."""
        first, model = len(self), self.model
        mask = np.tri(len(ids), first + len(ids), first, dtype=bool)
        x = model.weights["model.embed_tokens.weight"][list(ids)]
        for layer in range(model.shape.layers):
            q = self._append(layer, x)
            x = model.rest(layer, x, model.attend(q, self.keys[layer], self.values[layer], mask))
        return model.head(x[-1])

    def step(self, token, imposed=None):
        """({filter layer: Choice}, logits); `imposed` {filter layer: indices} replaces own choices
        in the sparse layers.
        """
        model, n = self.model, len(self) + 1
        x = model.weights["model.embed_tokens.weight"][[token]]
        choices, start = {}, self.rule.tail_start(n)
        for layer in range(model.shape.layers):
            q = self._append(layer, x)
            if layer in self.rule.filters:
                choices[layer] = self.choose(layer)
            rows = np.arange(n)
            if layer in self.source:
                filter_layer = self.source[layer]
                chosen = (imposed or {}).get(filter_layer, choices[filter_layer].indices)
                rows = np.concatenate([np.asarray(chosen, dtype=int), rows[start:]])
            x = model.rest(
                layer, x, model.attend(q, self.keys[layer][rows], self.values[layer][rows])
            )
        return choices, model.head(x[0])

    def choose(self, layer):
        """The selection of a filter layer from its keys and queries so far."""
        rule, keys, n = self.rule, self.keys[layer], len(self.keys[layer])
        scores = score(
            self.model,
            self.queries[layer][-(1 if rule.selector == "last" else rule.window) :],
            keys,
            rule,
        )
        scores = scores[: rule.tail_start(n)]
        scores[: rule.sink] = np.inf
        return Choice(top(scores, rule.k), scores, 0)


def score(model, queries, keys, rule):
    """Eq. 3 and 4: scores [n] of all keys [n, Hkv, D] under the last queries [W, H, D]; query j
    sees n - (W-1-j) keys.
    """
    total = np.zeros(len(keys))
    for alpha, (j, q) in zip(rule.weights(len(queries)), enumerate(queries)):
        seen = len(keys) - (len(queries) - 1 - j)
        logits = model.logits_of(q[None], keys[:seen])[:, 0]
        total[:seen] += alpha * (logits if rule.raw else softmax(logits)).max(axis=0)
    return total
