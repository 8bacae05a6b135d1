"""RazorAttention simulated densely in float64: every token's keys and values stay, masks say what a
head still has, and what it has dropped is one more column of its softmax.

The column's key is the mean of the dropped keys, turned to their positions, its value the mean of
the dropped values, and its logit has the log of their number. Nothing of the engine is used.
"""

from dataclasses import dataclass

import numpy as np

from tests.engine.methods.evicting_simulation import Conversation, Rule
from tests.engine.methods.official_simulation import softmax


@dataclass(frozen=True)
class RazorRule(Rule):
    """whole: [layer][K/V head] whether it keeps everything; the others keep `sink` first tokens and
    see the newest max(recent, prompt // part).
    """

    whole: tuple = ()
    part: int = 5

    def widest(self, prompt):
        """Newest tokens that a query sees after a prompt that ends there, itself one of them."""
        return max(self.recent, prompt // self.part)


class RazorConversation(Conversation):
    """As Conversation. A step sees the newest tokens of its window; between steps one less is."""

    newest = None

    def prompt(self, ids):
        """Read a prompt; its end says how wide the window is."""
        logits = self._forward(ids)
        self.newest = self.rule.widest(len(self.keys[0]))
        self._drop()
        return logits

    def step(self, token):
        """One token of an answer."""
        logits = self._forward([token])
        self._drop()
        return logits

    def _drop(self):
        n = len(self.keys[0])
        for alive, whole in zip(self.alive, self.rule.whole):
            for h, every in enumerate(whole):
                if not every:
                    alive[h, self.rule.sink : max(self.rule.sink, n - self.newest + 1)] = False

    def dropped(self, layer, h):
        """Positions that head h of a layer has dropped."""
        return np.flatnonzero(~self.alive[layer][h])

    def _forward(self, ids):
        model, first, count = self.model, len(self.keys[0]), len(ids)
        x = model.weights["model.embed_tokens.weight"][list(ids)]
        at = np.arange(first, first + count)
        for layer in range(model.shape.layers):
            normed = model.norm(x, f"model.layers.{layer}.input_layernorm.weight")
            q, k, v = (model.project(layer, part, normed) for part in "qkv")
            self.keys[layer] = np.concatenate([self.keys[layer], k])
            self.values[layer] = np.concatenate([self.values[layer], v])
            fresh = np.ones((model.shape.kv_heads, count), dtype=bool)
            self.alive[layer] = np.concatenate([self.alive[layer], fresh], 1)
            logits, out = self._logits(layer, q, at), []
            turned = model.rotate(self.keys[layer], np.arange(first + count))
            queries = model.rotate(q, at)
            for h in range(model.shape.heads):
                own, values = h // self.group, self.values[layer][:, h // self.group]
                seen, gone = logits[h], self.dropped(layer, own)
                if len(gone):
                    column = queries[:, h] @ turned[gone, own].mean(0)
                    column = column / np.sqrt(model.shape.head_dim) + np.log(len(gone))
                    seen = np.concatenate([seen, column[:, None]], 1)
                    values = np.concatenate([values, values[gone].mean(0)[None]])
                out.append(softmax(seen) @ values)
            x = model.rest(layer, x, np.stack(out, 1).reshape(count, -1))
        return model.head(x[-1])
