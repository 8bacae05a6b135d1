"""FastGen simulated densely in float64: every token's keys and values stay, masks say what a head
still has. Policies are restated from the paper; nothing of the engine is used.
"""

from dataclasses import dataclass

import numpy as np

from tests.engine.methods.evicting_simulation import Conversation, Rule, newest_first

CHAIN = ("special", "punctuation", "frequent", "local", "full")


@dataclass(frozen=True)
class FastGenRule(Rule):
    """special, punctuation: token ids; frequent, local: parts of the text; eps: what a head may
    lose; window: queries of a prompt that are profiled; every: tokens of an answer between cuts.
    """

    special: tuple = ()
    punctuation: tuple = ()
    frequent: float = 0.3
    local: float = 0.3
    eps: float = 0.05
    every: int = 4


class FastGenConversation(Conversation):
    """As Conversation, with a policy for each K/V head."""

    def __init__(self, model, rule):
        super().__init__(model, rule)
        shape = model.shape
        self.ids = []
        self.policies = [["full"] * shape.kv_heads for _ in range(shape.layers)]
        self.margin = 1.0  # the least distance between a loss and eps, of all decisions
        self.received = [np.zeros((shape.kv_heads, 0)) for _ in range(shape.layers)]

    def prompt(self, ids):
        """Read a prompt and profile its newest queries."""
        self.ids, self.answered = [*self.ids, *ids], 0
        logits = self._forward(ids)
        self._each(min(self.rule.window, len(ids)), True)
        return logits

    def step(self, token):
        """One token of an answer."""
        self.ids, self.answered = [*self.ids, token], self.answered + 1
        logits = self._forward([token])
        partly = any(policy != "full" for heads in self.policies for policy in heads)
        if self.answered % self.rule.every == 0 and partly:
            self._each(self.rule.every, False)
        return logits

    def _each(self, count, profile):
        """Cut every head, by what the newest `count` queries add to its scores."""
        n = len(self.ids)
        at = np.arange(n - count, n)
        for layer in range(self.model.shape.layers):
            weights = self._weights(layer, self._logits(layer, self.queries[layer][at], at))
            weights = weights.sum(1)
            more = np.zeros((len(self.alive[layer]), n - self.received[layer].shape[1]))
            self.received[layer] = np.concatenate([self.received[layer], more], 1)
            for h, alive in enumerate(self.alive[layer]):
                own = weights[h * self.group : (h + 1) * self.group]
                self.received[layer][h] += own.sum(0)
                if profile:
                    self.policies[layer][h] = self._profiled(layer, h, own / count)
                alive &= self.kept(layer, h, self.policies[layer][h])

    def _profiled(self, layer, h, own):
        """The first policy that keeps enough of every query head's attention."""
        if self.rule.eps == 0:
            return "full"
        for policy in CHAIN:
            lost = max((one * ~self.kept(layer, h, policy)).sum() for one in own)
            self.margin = min(self.margin, abs(lost - self.rule.eps))
            if lost <= self.rule.eps:
                return policy

    def kept(self, layer, h, policy):
        """Which of the tokens that head h still has a policy keeps."""
        n, ids, alive = len(self.ids), np.array(self.ids), self.alive[layer][h]
        found, number = np.isin(ids, self.rule.special), CHAIN.index(policy)
        if number >= 1:
            found = found | np.isin(ids, self.rule.punctuation)
        if number >= 2:
            scores = np.where(alive, self.received[layer][h], -np.inf)
            best = newest_first(scores)[: int(self.rule.frequent * n)]
            found[best] = True
        if number >= 3:
            found = found | (np.arange(n) >= n - int(self.rule.local * n))
        return np.ones(n, dtype=bool) if policy == "full" else found & alive
