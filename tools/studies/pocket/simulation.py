"""OmniKV, H2O and StreamingLLM on a Llama folder by masks, in plain torch float32: compares filter
layers before one is chosen.

The prompt is read with full attention once. Per setting only the rows of the answer are recomputed,
all at once, with the right tokens before them: an answer counts where every token's argmax is
right, and greedy decoding would then give it. tools.compare does the same through the engine; the
two must agree (tests/studies/test_pocket_simulation.py).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Setting:
    """filters empty and keep None: full attention. keep: "h2o" or "streaming" with `share` of the
    prompt kept in every layer.
    """

    filters: tuple[int, ...] = ()
    wait: int = 1
    share: float = 0.0667
    tail: int = 256
    keep: str | None = None


@dataclass
class Prompt:
    """A prompt that was read: per layer rotated keys and values [Hkv, P, D], and the attention that
    each token got from later ones.
    """

    keys: list[Tensor]
    values: list[Tensor]
    mass: list[Tensor]
    length: int


class Simulated:
    """A Llama folder (tied or untied, no biases, default rope) in float32."""

    def __init__(self, folder: Path):
        from safetensors.torch import load_file

        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
        c = self.config
        self.layers, self.heads, self.kv_heads = (
            c["num_hidden_layers"],
            c["num_attention_heads"],
            c["num_key_value_heads"],
        )
        self.dim = c.get("head_dim") or c["hidden_size"] // self.heads
        half = self.dim // 2
        theta = c.get("rope_theta") or c["rope_parameters"]["rope_theta"]
        self.frequency = theta ** (-torch.arange(half, dtype=torch.float32) / half)

    def _w(self, layer: int, name: str) -> Tensor:
        return self.weights[f"model.layers.{layer}.{name}.weight"]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config["rms_norm_eps"])

    def _rotate(self, x: Tensor, first: int) -> Tensor:
        angle = torch.arange(first, first + x.shape[1])[:, None] * self.frequency
        cos, sin = (torch.cat((f(angle),) * 2, -1) for f in (torch.cos, torch.sin))
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    def _qkv(self, x: Tensor, layer: int, first: int) -> tuple[Tensor, Tensor, Tensor]:
        h = self._norm(x, self._w(layer, "input_layernorm"))
        q, k, v = (
            (h @ self._w(layer, f"self_attn.{n}_proj").T).view(len(x), -1, self.dim).transpose(0, 1)
            for n in "qkv"
        )
        return self._rotate(q, first), self._rotate(k, first), v

    def _rest(self, x: Tensor, mixed: Tensor, layer: int) -> Tensor:
        x = x + mixed.transpose(0, 1).reshape(len(x), -1) @ self._w(layer, "self_attn.o_proj").T
        h = self._norm(x, self._w(layer, "post_attention_layernorm"))
        gate, up, down = (self._w(layer, f"mlp.{n}_proj") for n in ("gate", "up", "down"))
        return x + (F.silu(h @ gate.T) * (h @ up.T)) @ down.T

    @torch.inference_mode()
    def read(self, ids: list[int], with_mass: bool = False) -> Prompt:
        """Full attention over a prompt; with_mass also sums the attention every token got (for
        H2O).
        """
        x = self.weights["model.embed_tokens.weight"][ids]
        prompt, group = Prompt([], [], [], len(ids)), self.heads // self.kv_heads
        for layer in range(self.layers):
            q, k, v = self._qkv(x, layer, 0)
            kk, vv = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
            mixed = F.scaled_dot_product_attention(q[None], kk[None], vv[None], is_causal=True)[0]
            if with_mass:
                scores = (q @ kk.transpose(1, 2)) / math.sqrt(self.dim)
                scores = scores.masked_fill(
                    torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1), -math.inf
                )
                prompt.mass.append(scores.softmax(-1).sum(1).view(self.kv_heads, group, -1).sum(1))
            prompt.keys.append(k)
            prompt.values.append(v)
            x = self._rest(x, mixed, layer)
        return prompt

    @torch.inference_mode()
    def answer(self, prompt: Prompt, ids: list[int], setting: Setting) -> Tensor:
        """Logits [len(ids), vocab] after each of `ids`, which follow the prompt one by one, under a
        setting.
        """
        return self._follow(prompt, ids, setting)[0]

    @torch.inference_mode()
    def extend(self, prompt: Prompt, ids: list[int]) -> tuple[Prompt, Tensor]:
        """The prompt with more tokens read by full attention (mass stays that of the document), and
        the last one's logits [vocab].
        """
        logits, keys, values = self._follow(prompt, ids, Setting())
        return Prompt(keys, values, prompt.mass, prompt.length + len(ids)), logits[-1]

    def _follow(
        self, prompt: Prompt, ids: list[int], setting: Setting
    ) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        x = self.weights["model.embed_tokens.weight"][ids]
        rows, group, start = len(ids), self.heads // self.kv_heads, prompt.length
        after = torch.ones(rows, rows, dtype=torch.bool).tril()
        causal = torch.cat((torch.ones(rows, start, dtype=torch.bool), after), 1)
        roles = layer_roles(self.layers, setting.filters, setting.wait)
        chosen, keys, values = causal, [], []
        for layer in range(self.layers):
            q, k, v = self._qkv(x, layer, start)
            k, v = torch.cat((prompt.keys[layer], k), 1), torch.cat((prompt.values[layer], v), 1)
            keys.append(k)
            values.append(v)
            seen = causal
            if setting.keep:
                kept = kept_tokens(prompt, layer, setting).repeat_interleave(group, 0)
                seen = torch.cat(
                    (kept[:, None].expand(-1, rows, -1), after.expand(self.heads, -1, -1)), 2
                )
            elif roles[layer] == "sparse":
                seen = chosen
            scores = (q @ k.repeat_interleave(group, 0).transpose(1, 2)) / math.sqrt(self.dim)
            weight = scores.masked_fill(~seen, -math.inf).softmax(-1)
            if roles[layer] == "filter":
                chosen = choose(weight.amax(0), start, setting) & causal
            x = self._rest(x, weight @ v.repeat_interleave(group, 0), layer)
        head = self.weights.get("lm_head.weight", self.weights["model.embed_tokens.weight"])
        return self._norm(x, self.weights["model.norm.weight"]) @ head.T, keys, values


def layer_roles(layers: int, filters: tuple[int, ...], wait: int) -> list[str]:
    """ "full", "filter", "wait" or "sparse" per layer."""
    out, last = [], None
    for layer in range(layers):
        if layer in filters:
            last = layer
            out.append("filter")
        elif last is None:
            out.append("full")
        else:
            out.append("wait" if layer - last <= wait else "sparse")
    return out


def choose(scores: Tensor, prompt: int, setting: Setting) -> Tensor:
    """[rows, n] bool: the k best of the tokens before the tail, and the tail (a function of each
    row's own position).
    """
    rows, total = scores.shape
    budget = max(1, math.floor(setting.share * prompt))
    seen = torch.zeros(rows, total, dtype=torch.bool)
    for row in range(rows):
        length = prompt + row + 1
        tail = max(0, length // 64 * 64 - setting.tail)
        seen[row, scores[row, :tail].topk(min(budget, tail)).indices] = True
        seen[row, tail:length] = True
    return seen


def kept_tokens(prompt: Prompt, layer: int, setting: Setting) -> Tensor:
    """[Hkv, P] bool: the tokens of the document that an evicting method keeps, and all of the
    question after it.

    H2O: half the budget the newest, half those with the most attention; StreamingLLM: four first
    tokens, the rest the newest.
    """
    document = prompt.mass[layer].shape[1]
    count = max(5, math.floor(setting.share * document))
    kept = torch.zeros(prompt.keys[0].shape[0], prompt.length, dtype=torch.bool)
    kept[:, document:] = True
    if setting.keep == "streaming":
        kept[:, :4] = True
        kept[:, document - (count - 4) : document] = True
        return kept
    recent = count // 2
    kept[:, document - recent : document] = True
    best = prompt.mass[layer][:, : document - recent].topk(count - recent, dim=1).indices
    return kept.scatter_(1, best, True)
