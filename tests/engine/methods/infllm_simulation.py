"""InfLLM in float64, written from the paper's description: a list of all tokens, blocks that are
taken out of the remainder, one softmax per query. No ring, no layout formula, no table of places;
keys and queries before rotation. Of a limited number of blocks the one that was read longest ago
goes.
"""

import numpy as np
import torch


class Stream:
    """The published system for one layer. limit: blocks that stay; None: all."""

    def __init__(self, method, heads, kv_heads, freq, scaling=1.0, limit=None):
        self.m, self.group, self.kv_heads, self.freq, self.scaling = (
            method,
            heads // kv_heads,
            kv_heads,
            freq.double(),
            scaling,
        )
        self.limit = limit
        self.k, self.v, self.score = [], [], []  # per token
        # token numbers; blocks: [numbers, mean representative [H, D], when it was read last]
        self.initial, self.blocks, self.rest = [], [], []
        self.gone = []  # token numbers of the blocks that went, in order

    def turn(self, x, position):
        """Rotate [.., D] to a position."""
        angle = position * self.freq
        a, b = x.chunk(2, -1)
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    def piece(self, q, k, v):
        """q [C, H, D], k, v [C, Hkv, D]: outputs [C, H, D], and the tokens that the last query saw
        outside its window.
        """
        start, m = len(self.k), self.m
        self.k += list(k)
        self.v += list(v)
        self.score += [torch.zeros(q.shape[1], dtype=torch.float64) for _ in k]
        self.rest += range(start, start + len(k))
        mean = self.turn(q, m.local).mean(0)
        order = sorted(
            range(len(self.blocks)), key=lambda b: -float((mean * self.blocks[b][1]).sum())
        )
        chosen = sorted(order[: m.topk])
        for b in chosen:
            self.blocks[b][2] = start
        far = [*self.initial, *(t for b in chosen for t in self.blocks[b][0])]
        out = torch.empty(q.shape, dtype=torch.float64)
        for i in range(len(q)):
            at = start + i
            near = list(range(max(0, at - m.local + 1), at + 1))
            old = [*far, *(t for t in self.rest if t <= at - m.local)]
            scores = torch.stack(
                [*(self.k[t] for t in old), *(self.turn(self.k[t], t) for t in near)]
            ).repeat_interleave(self.group, 1)
            asked = torch.stack(
                [*[self.turn(q[i], m.local)] * len(old), *[self.turn(q[i], at)] * len(near)]
            )
            # [n, H]
            weights = torch.softmax(
                (asked * scores).sum(-1) * self.scaling**2 / q.shape[2] ** 0.5, 0
            )
            values = torch.stack([self.v[t] for t in old + near]).repeat_interleave(self.group, 1)
            out[i] = (weights.unsqueeze(-1) * values).sum(0)
            for w, t in zip(weights[len(old) :], near):
                self.score[t] += w
        self.settle()
        return out, old

    def settle(self):
        """First the initial tokens leave the remainder, then whole blocks, as long as a window
        stays.
        """
        m = self.m
        while len(self.initial) < m.init and len(self.rest) > m.local:
            self.initial.append(self.rest.pop(0))
        while len(self.initial) == m.init and len(self.rest) - m.block >= m.local:
            rows, self.rest = self.rest[: m.block], self.rest[m.block :]
            heads = []
            for h in range(self.kv_heads * self.group):
                best = sorted(rows, key=lambda t: -float(self.score[t][h]))[: m.representatives]
                heads.append(torch.stack([self.k[t][h // self.group] for t in best]).mean(0))
            if self.limit is not None and len(self.blocks) == self.limit:
                oldest = min(self.blocks, key=lambda block: (block[2], block[0][0]))
                self.blocks.remove(oldest)
                self.gone.append(oldest[0])
                for t in oldest[0]:
                    self.k[t] = self.v[t] = None  # nothing may look at them again
            self.blocks.append([rows, torch.stack(heads), len(self.k)])


class Text:
    """A whole model (tests/engine/methods/official_simulation.py, Model), of whose layers each is
    a Stream.
    """

    def __init__(self, model, method, freq, limit=None):
        shape = model.shape
        self.model, self.method, self.length = model, method, 0
        given = method, shape.heads, shape.kv_heads, freq, 1.0, limit
        self.layers = [Stream(*given) for _ in range(shape.layers)]

    def read(self, ids):
        """Logits of every token of a chunk or step [T, vocab], pieces ending at absolute multiples
        of `chunk`.
        """
        model, first, count = self.model, self.length, len(ids)
        size = self.method.chunk
        ends = [*range((first // size + 1) * size, first + count, size), first + count]
        x = model.weights["model.embed_tokens.weight"][list(ids)]
        for layer, stream in enumerate(self.layers):
            normed = model.norm(x, f"model.layers.{layer}.input_layernorm.weight")
            q, k, v = (torch.from_numpy(model.project(layer, part, normed)) for part in "qkv")
            out, at = [], first
            for stop in ends:
                part = slice(at - first, stop - first)
                out.append(stream.piece(q[part], k[part], v[part])[0])
                at = stop
            x = model.rest(layer, x, torch.cat(out).numpy().reshape(count, -1))
        self.length += count
        return np.stack([model.head(row) for row in x])
