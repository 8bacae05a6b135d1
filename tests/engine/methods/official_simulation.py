"""The published OmniKV code simulated in float64 from a description of its behaviour alone; nothing
of the engine is used.

Plain numpy, one sequence. Weights come under their Hugging Face names. Rotation angles are the
float32 products that the published code's transformers computes; everything else is float64.
"""

from dataclasses import dataclass

import numpy as np

SCORINGS = ("last", "softmax_before_last", "uniform", "exp")
RELATIVE = 1e-5  # a float64 gap at rank k below this is a tie to float32


@dataclass(frozen=True)
class Shape:
    """What the forward pass must know of a model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float = 10000.0


@dataclass(frozen=True)
class Settings:
    """do_select_layers, num_wait_load_layers, selector_cls, num_of_selected_tokens (int or float)
    and window_size.
    """

    filters: tuple
    wait: int
    scoring: str
    budget: int | float
    window: int = 16

    @property
    def windowed(self):
        """Whether the last `window` tokens' queries score, not the current one's alone."""
        return self.scoring in ("uniform", "exp")


def source_of(layers, filters, wait):
    """{sparse layer: the filter layer whose selection it uses}; all other layers are dense."""
    found = {}
    for layer in range(layers):
        below = [f for f in filters if f <= layer]
        if below and layer > below[-1] + wait:
            found[layer] = below[-1]
    return found


def softmax(x):
    """Over the last axis; of no keys, nothing."""
    if x.shape[-1] == 0:
        return x
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class Model:
    """Llama's forward pass in pieces. Hidden states [T, hidden], queries [T, H, D], keys and values
    [T, Hkv, D].
    """

    def __init__(self, shape, weights):
        self.shape = shape
        self.weights = {name: np.asarray(w, dtype=np.float64) for name, w in weights.items()}

    def norm(self, x, name):
        """RMSNorm with the weight of this name."""
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.shape.eps) * self.weights[name]

    def project(self, layer, part, x):
        """One of q, k, v of normed hidden states, split into heads, not rotated."""
        y = x @ self.weights[f"model.layers.{layer}.self_attn.{part}_proj.weight"].T
        return y.reshape(len(x), -1, self.shape.head_dim)

    def rotate(self, x, positions):
        """Rotary embedding of x [T, heads, D] at positions [T]."""
        half = self.shape.head_dim // 2
        exponents = np.arange(0, self.shape.head_dim, 2).astype(np.float32) / np.float32(
            self.shape.head_dim
        )
        frequency = (np.float32(1.0) / np.float32(self.shape.theta) ** exponents).astype(np.float32)
        angle = (np.asarray(positions, dtype=np.float32)[:, None] * frequency).astype(np.float64)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def logits_of(self, q, k):
        """Scaled scores [H, T, keys] of q [T, H, D] against k [keys, Hkv, D], kv heads repeated."""
        k = np.repeat(k, self.shape.heads // self.shape.kv_heads, axis=1)
        return q.transpose(1, 0, 2) @ k.transpose(1, 2, 0) / np.sqrt(self.shape.head_dim)

    def attend(self, q, k, v, mask=None):
        """Attention output [T, H * D]."""
        scores = self.logits_of(q, k)
        if mask is not None:
            scores = np.where(mask, scores, -np.inf)
        v = np.repeat(v, self.shape.heads // self.shape.kv_heads, axis=1)
        return (softmax(scores) @ v.transpose(1, 0, 2)).transpose(1, 0, 2).reshape(len(q), -1)

    def rest(self, layer, x, attended):
        """Output projection, residual, MLP."""
        at = f"model.layers.{layer}."
        x = x + attended @ self.weights[at + "self_attn.o_proj.weight"].T
        y = self.norm(x, at + "post_attention_layernorm.weight")
        gate, up = (y @ self.weights[f"{at}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        return x + (gate / (1 + np.exp(-gate)) * up) @ self.weights[at + "mlp.down_proj.weight"].T

    def head(self, x):
        """Logits of one hidden state."""
        return self.norm(x, "model.norm.weight") @ self.weights["lm_head.weight"].T


@dataclass
class Prompt:
    """What prefill leaves: rotated keys, values, normed hidden states of every layer, the last
    token's logits.
    """

    length: int
    keys: list
    values: list
    normed: list
    logits: np.ndarray


def prefill(model, ids):
    """Full attention in every layer; the same for all settings."""
    x = model.weights["model.embed_tokens.weight"][list(ids)]
    count = len(ids)
    positions, mask = np.arange(count), np.tri(count, dtype=bool)
    prompt = Prompt(count, [], [], [], None)
    for layer in range(model.shape.layers):
        normed = model.norm(x, f"model.layers.{layer}.input_layernorm.weight")
        q, k = (model.rotate(model.project(layer, part, normed), positions) for part in ("q", "k"))
        v = model.project(layer, "v", normed)
        prompt.keys.append(k)
        prompt.values.append(v)
        prompt.normed.append(normed)
        x = model.rest(layer, x, model.attend(q, k, v, mask))
    prompt.logits = model.head(x[-1])
    return prompt


@dataclass
class Choice:
    """One filter layer's selection in one step: ascending indices, their scores, and how many were
    forced.
    """

    indices: np.ndarray
    scores: np.ndarray  # of the scored keys 0 .. S - forced - 1
    forced: int


class Decode:
    """The steps after a prompt. `seen` counts the keys that each layer attended to in the last
    step.
    """

    def __init__(self, model, prompt, settings):
        if prompt.length < 2 or (settings.windowed and prompt.length < settings.window - 1):
            raise ValueError("the published code fails on a prompt this short")
        self.model, self.settings, self.length = model, settings, prompt.length
        self.keys, self.values = list(prompt.keys), list(prompt.values)
        self.windows = {f: prompt.normed[f][-settings.window :] for f in settings.filters}
        self.source = source_of(model.shape.layers, settings.filters, settings.wait)
        self.budget = (
            settings.budget
            if isinstance(settings.budget, int)
            else int(settings.budget * prompt.length)
        )
        self.step_number = 0
        self.seen = {}

    def step(self, token, imposed=None):
        """Feed one token: ({filter layer: Choice}, logits). `imposed` {filter layer: indices}
        replaces own choices.
        """
        self.step_number += 1
        model, position = self.model, [self.length + self.step_number - 1]
        x = model.weights["model.embed_tokens.weight"][[token]]
        choices, in_use = {}, {}
        for layer in range(model.shape.layers):
            normed = model.norm(x, f"model.layers.{layer}.input_layernorm.weight")
            if layer in self.settings.filters:
                choices[layer] = self._choose(layer, normed, position)
                in_use[layer] = (imposed or {}).get(layer, choices[layer].indices)
            q, k = (
                model.rotate(model.project(layer, part, normed), position) for part in ("q", "k")
            )
            self.keys[layer] = np.concatenate([self.keys[layer], k])
            self.values[layer] = np.concatenate(
                [self.values[layer], model.project(layer, "v", normed)]
            )
            rows = np.arange(len(self.keys[layer]))
            if layer in self.source:
                rows = np.concatenate(
                    [np.asarray(in_use[self.source[layer]], dtype=int), rows[self.length :]]
                )
            self.seen[layer] = len(rows)
            x = model.rest(
                layer, x, model.attend(q, self.keys[layer][rows], self.values[layer][rows])
            )
        return choices, model.head(x[0])

    def _choose(self, layer, normed, position):
        """The selection before this layer's own attention, from its input after its input norm."""
        settings, model = self.settings, self.model
        if not settings.windowed:
            q = model.rotate(model.project(layer, "q", normed), position)
            scores = model.logits_of(q, self.keys[layer][: self.length])[:, 0]
            scores = (softmax(scores) if settings.scoring == "softmax_before_last" else scores).max(
                axis=0
            )
            return Choice(top(scores, self.budget), scores, 0)
        window = np.concatenate([self.windows[layer], normed])[-settings.window :]
        self.windows[layer] = window
        inside = max(0, settings.window - self.step_number)
        scored = self.length - inside
        q = model.rotate(model.project(layer, "q", window), position * len(window))
        # [W, scored]
        each = softmax(model.logits_of(q, self.keys[layer][:scored])).max(axis=0)
        weights = (
            np.ones(len(window))
            if settings.scoring == "uniform"
            else 0.5 ** np.arange(len(window))[::-1]
        )
        scores = weights @ each
        chosen = top(scores, max(1, self.budget - inside))
        return Choice(np.concatenate([chosen, np.arange(scored, self.length)]), scores, inside)


def top(scores, k):
    """Indices of the k largest, ascending; k capped at their number."""
    return np.sort(np.argsort(-scores, kind="stable")[: min(k, len(scores))])


def check_choice(mine, choice, k):
    """Equal, or different only where the float64 scores around rank k are a float32 tie; returns
    whether they were.
    """
    mine, theirs = np.asarray(mine), choice.indices
    assert (np.diff(mine) > 0).all(), mine
    if np.array_equal(mine, theirs):
        return False
    assert len(mine) == len(theirs), (len(mine), len(theirs))
    last_in = np.sort(choice.scores)[::-1][k - 1]
    for index in set(mine.tolist()) ^ set(theirs.tolist()):
        assert index < len(choice.scores), f"index {index} is not among the scored keys"
        assert abs(choice.scores[index] - last_in) < RELATIVE * abs(last_in), (mine, theirs)
    return True
