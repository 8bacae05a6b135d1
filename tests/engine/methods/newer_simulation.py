"""The methods of 2024 to 2026 that evict, simulated densely in float64 (evicting_simulation.py):
restated from what docs/METHODS.md says of their sources, with loops where the engine has tiles.

Chance is computed anew in Python's integers.
"""

import math
from dataclasses import dataclass

import numpy as np

from tests.engine.methods.evicting_simulation import Conversation, Rule, newest_first
from tests.engine.methods.official_simulation import softmax

WORD = (1 << 64) - 1


def mix(x):
    """MurmurHash3's finalizer of 64 bits."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x = (x ^ (x >> 33)) * factor & WORD
    return x ^ (x >> 33)


def chance(seed, layer, head, length, position):
    """Standard Gumbel noise of one token at one cut."""
    x = length * 0x1000003 + head * 0x5BD1E995 + seed * 0x27D4EB2F + layer * 0x165667B1
    u = ((mix(mix(x & WORD) ^ position * 0x9E3779B1) >> 20 & 0xFFFFFF) + 0.5) / (1 << 24)
    return -math.log(-math.log(u))


@dataclass(frozen=True)
class NewRule(Rule):
    """name: rkv | vase | random | random_prompt_kept | roco | expected | zigzag. every: tokens
    between cuts in an answer (0: none); weight: R-KV's lambda; protect: VaSE's share; seed: of
    chance; floor: ZigZagKV's.
    """

    every: int = 0
    weight: float = 0.0
    protect: float = 0.0
    seed: int = 0
    floor: float = 0.0


class NewConversation(Conversation):
    """As Conversation, under one of these rules."""

    def prompt(self, ids):
        self.answered, self.begun = 0, len(self.keys[0])
        logits = self._forward(ids)
        layers = range(self.model.shape.layers)
        self.read = len(self.keys[0])
        self.budgets = [self.rule.budget] * len(layers)
        if self.rule.name == "zigzag":
            self.budgets = self._needed()
        for layer in layers:
            if self.rule.name != "random_prompt_kept":
                self._cut(layer, self.budgets[layer])
        return logits

    def step(self, token):
        self.answered += 1
        logits = self._forward([token])
        for layer in range(self.model.shape.layers) if self.rule.every else ():
            over = self.alive[layer][0].sum() - self.budgets[layer]
            if self.rule.name == "random_prompt_kept":
                over = self.alive[layer][0, self.read :].sum() - self.rule.budget
            if over >= self.rule.every:
                self._cut(layer, self.alive[layer][0].sum() - over)
        return logits

    def _added(self, layer, logits, weights):
        """RoCo's sums of a group's mean weights, and of their squares."""
        mean = self.of_group(weights).mean(1)
        sums = np.stack([mean.sum(1), (mean**2).sum(1)], 1)
        if not hasattr(self, "sums"):
            self.sums = [np.zeros((len(mean), 2, 0)) for _ in self.keys]
        old = self.sums[layer]
        self.sums[layer] = sums
        self.sums[layer][:, :, : old.shape[2]] += old
        return 0.0

    def of_group(self, x):
        """[H, ..] as [Hkv, G, ..]."""
        return x.reshape(-1, self.group, *x.shape[1:])

    def _cut(self, layer, budget):
        for head, alive in enumerate(self.alive[layer]):
            where = np.flatnonzero(alive)
            if len(where) > budget:
                scores = getattr(self, f"_{self.rule.name}")(layer, head, where, budget)
                alive[where[newest_first(scores)[budget:]]] = False

    def _window(self, layer):
        """Logits [Hkv, G, W, T] of the newest queries."""
        n = len(self.keys[layer])
        at = np.arange(max(0, n - self.rule.window), n)
        return self.of_group(self._logits(layer, self.queries[layer][at], at))

    def _rkv(self, layer, head, where, budget):
        n, rule = len(self.keys[layer]), self.rule
        before = where[where < n - rule.window]
        weights = softmax(self._window(layer)[head].max(0)[:, before]).mean(0)
        half = rule.kernel // 2
        pooled = [weights[max(0, i - half) : i + half + 1].max() for i in range(len(before))]
        keys = self.model.rotate(self.keys[layer], np.arange(n))[where, head]
        unit = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
        cosines = unit @ unit.T
        for i, row in enumerate(cosines):
            row[i] = 0.0
            similar = np.flatnonzero(row > 0.5)
            if len(similar):
                row[similar[-1]] = 0.0
        alike = softmax(cosines.mean(0))[: len(before)]
        scores = rule.weight * np.array(pooled) - (1 - rule.weight) * alike
        return np.concatenate([scores, np.full(len(where) - len(before), np.inf)])

    def _vase(self, layer, head, where, budget):
        n, rule = len(self.keys[layer]), self.rule
        before = where[where < n - rule.window]
        weights = softmax(self._window(layer)[head][:, :, before]).mean(1)
        half, count = rule.kernel // 2, len(before)
        pooled = [
            weights[:, max(0, i - half) : i + half + 1].sum(1) / rule.kernel for i in range(count)
        ]
        drawn = [chance(rule.seed, layer, head, n, int(at)) for at in before]
        scores = np.log(np.mean(pooled, axis=1)) + drawn
        values = self.values[layer][before, head]
        ranges = np.where(before < rule.sink, np.inf, values.max(-1) - values.min(-1))
        large = newest_first(ranges)[: min(int(rule.protect * budget), budget - rule.window)]
        scores[large] = np.inf
        return np.concatenate([scores, np.full(len(where) - count, np.inf)])

    def _random(self, layer, head, where, budget):
        n = len(self.keys[layer])
        drawn = [chance(self.rule.seed, layer, head, n, int(at)) for at in where]
        return np.where(where >= n - self.rule.recent, np.inf, drawn)

    def _random_prompt_kept(self, layer, head, where, budget):
        drawn = self._random(layer, head, where, budget)
        return np.where(where < self.read, np.inf, drawn)

    def _roco(self, layer, head, where, budget):
        n, (first, second) = len(self.keys[layer]), self.sums[layer][head][:, where]
        mean, seen = first / (n - where), n - where
        deviation = np.sqrt(np.maximum(second / seen - mean**2, 0))
        newest = where >= n - self.rule.recent
        deviation[newest] = mean[newest] = np.inf
        mean[newest_first(deviation)[: int(self.rule.protect * budget) + 1]] = np.inf
        return mean

    def _expected(self, layer, head, where, budget):
        n, sink = len(self.keys[layer]), self.rule.sink
        dim = self.model.shape.head_dim
        turn = np.mean([self._matrix(at) for at in range(n, n + 512)], axis=0)
        keys = self.model.rotate(self.keys[layer], np.arange(n))[where, head]
        found = []
        for one in range(head * self.group, (head + 1) * self.group):
            q = self.queries[layer][max(sink, self.begun) : n, one]
            mean = turn @ q.mean(0)
            spread = turn @ np.cov(q.T, bias=True) @ turn.T
            logits = keys @ mean / np.sqrt(dim)
            logits += np.einsum("td,de,te->t", keys, spread, keys) / (2 * dim)
            found.append(softmax(np.where(where < sink, -np.inf, logits)))
        scores = np.mean(found, axis=0) * np.linalg.norm(self.values[layer][where, head], axis=-1)
        return np.where(where < sink, np.inf, scores)

    def _matrix(self, position):
        """The rotation to a position, [D, D]."""
        eye = np.eye(self.model.shape.head_dim)[:, None]
        return self.model.rotate(eye, np.full(len(eye), position))[:, 0].T

    def _zigzag(self, layer, head, where, budget):
        before, scores = self.pooled(layer)[head]
        return np.concatenate([scores, np.full(len(where) - len(before), np.inf)])

    def _needed(self):
        """Layer budgets: whole tokens by largest remainders."""
        rule, needs = self.rule, []
        n = len(self.keys[0])
        for layer in range(self.model.shape.layers):
            at = np.arange(max(0, n - rule.window), n)
            weights = softmax(self._logits(layer, self.queries[layer][at], at)).mean(1)
            ranked = -np.sort(-weights, axis=-1)
            needs.append(np.mean([(np.cumsum(row) < 0.9).sum() + 1 for row in ranked]))
        low = max(rule.window, int(rule.floor * rule.budget))
        wanted = (rule.budget - low) * len(needs) * np.array(needs) / sum(needs)
        assert (wanted + low <= n).all()  # no layer is full: what that needs has tests of its own
        counts = np.floor(wanted + 1e-9).astype(int)
        left = round(wanted.sum()) - counts.sum()
        for i in np.argsort(counts - wanted, kind="stable")[:left]:
            counts[i] += 1
        return [low + int(count) for count in counts]
