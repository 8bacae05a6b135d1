"""Evicting methods simulated densely in float64: every token's keys and values stay, and masks say
which are still alive.

The forward pass is official_simulation.Model's; nothing of the engine is used. Restated from the
papers (docs/METHODS.md names them): what a query sees, what it adds to the scores, and which
tokens die when. Distances of StreamingLLM and LM-Infinite are applied as they are defined: an
unrotated key against a query rotated by the distance.
"""

from dataclasses import dataclass

import numpy as np

from tests.engine.methods.official_simulation import softmax


@dataclass(frozen=True)
class Rule:
    """name: h2o | a2sf | keyformer | scissorhands | streaming_llm | lm_infinite | snapkv |
    ada_snapkv. budget: tokens per K/V head; recent: newest ones that are never dropped; forgetting:
    A2SF's; tau_delta: of Keyformer without noise, tau 1 at first; history, most: Scissorhands';
    window, kernel: SnapKV's; alpha: Ada-KV's; sink: first tokens of the window methods.
    """

    name: str
    budget: int
    recent: int = 0
    window: int = 0
    kernel: int = 1
    alpha: float = 0.0
    sink: int = 0
    forgetting: float = 1.0
    tau_delta: float = 0.0
    history: int = 0
    most: int = 0

    @property
    def summed(self):
        """Whether tokens live by the attention they have received."""
        return self.name in ("h2o", "a2sf", "keyformer", "scissorhands")

    @property
    def by_position(self):
        """Whether a query's distance, not a cut, decides what it sees."""
        return self.name in ("streaming_llm", "lm_infinite")


class Conversation:
    """One sequence: `prompt` appends tokens, `step` one token of an answer; both return logits of
    the last one.
    """

    def __init__(self, model, rule):
        self.model, self.rule, shape = model, rule, model.shape
        self.group = shape.heads // shape.kv_heads
        # not rotated
        self.keys = [np.zeros((0, shape.kv_heads, shape.head_dim)) for _ in range(shape.layers)]
        self.values = [k.copy() for k in self.keys]
        self.alive = [np.zeros((shape.kv_heads, 0), dtype=bool) for _ in range(shape.layers)]
        self.scores = [np.zeros((shape.heads, 0)) for _ in range(shape.layers)]
        self.queries = [np.zeros((0, shape.heads, shape.head_dim)) for _ in range(shape.layers)]

    def prompt(self, ids):
        """Read a prompt; the window and the store are cut at its end where the rule says so."""
        self.answered = 0
        logits = self._forward(ids)
        for layer in range(self.model.shape.layers):
            if self.rule.name in ("snapkv", "ada_snapkv"):
                self._snap(layer)
            elif self.rule.summed and self.rule.name != "h2o":
                self._heavy(layer, self.rule.budget)
            if self.rule.name == "scissorhands":
                self.scores[layer][:] = 0
        return logits

    def step(self, token):
        """One token of an answer."""
        self.answered += 1
        logits = self._forward([token])
        for layer in range(self.model.shape.layers):
            if self.rule.name == "scissorhands":
                if self.alive[layer][0].sum() > self.rule.most:
                    self._heavy(layer, self.rule.budget)
                    self.scores[layer][:] = 0
            elif self.rule.summed:
                self._heavy(layer, self.rule.budget)
        return logits

    def _forward(self, ids):
        model, first, count = self.model, len(self.keys[0]), len(ids)
        x = model.weights["model.embed_tokens.weight"][list(ids)]
        at = np.arange(first, first + count)
        for layer in range(model.shape.layers):
            normed = model.norm(x, f"model.layers.{layer}.input_layernorm.weight")
            q, k, v = (model.project(layer, part, normed) for part in "qkv")
            self.keys[layer], self.values[layer] = (
                np.concatenate([self.keys[layer], k]),
                np.concatenate([self.values[layer], v]),
            )
            self.alive[layer] = np.concatenate(
                [self.alive[layer], np.ones((model.shape.kv_heads, count), dtype=bool)], 1
            )
            self.scores[layer] = np.concatenate(
                [self.scores[layer], np.zeros((model.shape.heads, count))], 1
            )
            logits = self._logits(layer, q, at)
            weights = self._weights(layer, logits)
            self.scores[layer] = self.scores[layer] * self.rule.forgetting**count + self._added(
                layer, logits, weights
            )
            values = np.repeat(self.values[layer], self.group, axis=1).transpose(1, 0, 2)
            x = model.rest(layer, x, (weights @ values).transpose(1, 0, 2).reshape(count, -1))
            self.queries[layer] = np.concatenate([self.queries[layer], q])
        return model.head(x[-1])

    def _weights(self, layer, logits, tau=1.0):
        """Softmax of logits [H, C, T] over tau."""
        return softmax(logits / tau)

    def _added(self, layer, logits, weights):
        """What the queries of a chunk add to the scores [H, T]."""
        count = weights.shape[1]
        if self.rule.name == "keyformer":
            tau = 1 + self.answered * self.rule.tau_delta
            return self._weights(layer, logits, tau).sum(1)
        if self.rule.name == "scissorhands":
            late = np.arange(count)[:, None] >= count - self.rule.history
            if self.answered:
                late[:] = self.rule.most + 1 - self.alive[layer][0].sum() < self.rule.history
            seen = np.isfinite(logits)  # a query counts against what it sees and looks past
            low = seen & (weights < 1 / seen.sum(-1, keepdims=True))
            return -(low & late).sum(1)
        return (weights * self.rule.forgetting ** np.arange(count - 1, -1, -1)[:, None]).sum(1)

    def _logits(self, layer, q, at):
        """[H, C, T]: -inf where a query sees nothing."""
        model, keys = self.model, np.repeat(self.keys[layer], self.group, axis=1)
        there = np.arange(len(keys))
        ages = at[:, None] - there
        if not self.rule.by_position:
            turned = model.rotate(q, at)
            found = turned.transpose(1, 0, 2) @ model.rotate(keys, there).transpose(1, 2, 0)
            seen = (ages >= 0) & np.repeat(self.alive[layer], self.group, axis=0)[:, None]
        else:
            window = self.rule.budget - self.rule.sink
            far = (
                self.rule.budget - 1 - there
                if self.rule.name == "streaming_llm"
                else np.full(len(keys), window)
            )
            distance = np.where(there < self.rule.sink, np.minimum(ages, far), ages)
            turned = [
                model.rotate(np.repeat(q[j : j + 1], len(keys), axis=0), distance[j])
                for j in range(len(q))
            ]
            found = np.stack([(one * keys).sum(-1).T for one in turned], axis=1)
            seen = ((ages >= 0) & ((there < self.rule.sink) | (ages < window)))[None]
        return np.where(seen, found / np.sqrt(model.shape.head_dim), -np.inf)

    def _heavy(self, layer, budget):
        """The newest tokens and those of the largest scores, maximum (H2O, Keyformer) or sum over a
        group.
        """
        n, reduce = (
            len(self.keys[layer]),
            np.max if self.rule.name in ("h2o", "keyformer") else np.sum,
        )
        for h, alive in enumerate(self.alive[layer]):
            sums = reduce(self.scores[layer][h * self.group : (h + 1) * self.group], axis=0)
            sums = np.where(alive, sums, -np.inf)
            sums[n - self.rule.recent :] = np.inf
            if alive.sum() > budget:
                alive[newest_first(sums)[budget:]] = False

    def pooled(self, layer):
        """SnapKV's scores of the living tokens before the window: [(positions, pooled scores)] per
        K/V head.
        """
        window, n = self.rule.window, len(self.keys[layer])
        at = np.arange(max(0, n - window), n)
        logits = self._logits(layer, self.queries[layer][at], at)
        weights = self._weights(layer, logits).mean(1)
        found = []
        for h, alive in enumerate(self.alive[layer]):
            where = np.flatnonzero(alive[: n - window])
            mean, half = (
                weights[h * self.group : (h + 1) * self.group].mean(0)[where],
                self.rule.kernel // 2,
            )
            found.append(
                (
                    where,
                    np.array(
                        [mean[max(0, i - half) : i + half + 1].max() for i in range(len(where))]
                    ),
                )
            )
        return found

    def _snap(self, layer):
        """SnapKV, Ada-SnapKV: the window and the highest pooled scores, as many as each head's
        budget.
        """
        window, n, found = self.rule.window, len(self.keys[layer]), self.pooled(layer)
        base, heads = self.rule.budget - window, len(found)
        if sum(len(where) for where, _ in found) <= base * heads:
            return
        counts = np.full(heads, base)
        if self.rule.name == "ada_snapkv":
            best = sorted(
                ((s, h) for h, (_, scores) in enumerate(found) for s in scores), reverse=True
            )[: base * heads]
            wanted = (
                self.rule.alpha * np.bincount([h for _, h in best], minlength=heads)
                + (1 - self.rule.alpha) * base
            )
            counts = np.floor(wanted).astype(int)
            for h in np.argsort(counts - wanted, kind="stable")[: base * heads - counts.sum()]:
                counts[h] += 1
        for alive, (where, scores), count in zip(self.alive[layer], found, counts):
            alive[: n - window] = False
            alive[where[newest_first(scores)[:count]]] = True

    def kept(self, layer):
        """Positions alive: one ascending list per K/V head."""
        n = len(self.keys[layer])
        if self.rule.by_position:
            low = n - (self.rule.budget - self.rule.sink)
            return [[i for i in range(n) if i < self.rule.sink or i >= low]] * len(
                self.alive[layer]
            )
        return [np.flatnonzero(alive).tolist() for alive in self.alive[layer]]


def newest_first(scores):
    """Indices by descending score; of equal scores (pooling makes them) the newer token first."""
    return len(scores) - 1 - np.argsort(-scores[::-1], kind="stable")
