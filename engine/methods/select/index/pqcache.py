"""PQCache: keys as codes of a product quantiser; the logits of codes choose tokens.

Source: Zhang et al., PQCache, SIGMOD 2025, and HugoZHL/PQCache (pq_search.py). A key is cut into
`parts` pieces, each of which is the number of its nearest centroid (published: 2 pieces, 64
centroids, by k-means in Euclidean distance); the logit of a token is a sum of table entries.
Published: 32 first tokens always read, half of the budget the newest tokens, a softmax of these
logits over the tokens between summed over a group's query heads, tokens of the answer coded by the
centroids of the prompt. There the centroids are those of the whole prompt; here of the first
`train` tokens, and everything is read until there are so many: so an index is made while rows are
on the device, does not depend on chunks, and follows the text back. Every layer chooses. Prompts
are read densely.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from engine.bank.base import Step
from engine.base.checks import integer, one_of
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.select.base import Buffer
from engine.methods.select.index.base import (
    REDUCTIONS,
    Indexed,
    IndexRuntime,
)
from engine.methods.select.index.clusters import cluster, nearest
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from kernels.index.choose import choose_by_codes
from kernels.index.indexes import Codes, Ends
from kernels.index.learn import Learnt, learn_code, told_code
from kernels.index.step import Now
from kernels.rows.forms import key_floats

NEWEST = 2  # the newest tokens are this part of the budget


@dataclass(frozen=True)
class PQCache(Indexed):
    """Budget as Budgeted's, the first and the newest tokens included. sink: first tokens, always
    read. parts: pieces of a key. bits: of a piece's code. train: tokens behind the first whose keys
    make the centroids. rounds: of k-means. dense_layers, gqa_reduce: as Indexed's, over weights.
    """

    full_prompts = True

    sink: int = 32
    parts: int = 2
    bits: int = 6
    train: int = 2048
    rounds: int = 25
    dense_layers: int = 0
    gqa_reduce: str = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("sink", self.sink, 0)
        integer("parts", self.parts, 1)
        integer("bits", self.bits, 1, 8)
        integer("train", self.train, 2**self.bits)
        integer("rounds", self.rounds, 0)
        one_of("gqa_reduce", self.gqa_reduce, REDUCTIONS[:-1])

    def budget(self, length: int) -> int:
        """The first tokens, one more, and as many of the newest at least."""
        return max(NEWEST * (self.sink + 1), super().budget(length))

    def newest(self, budget: int) -> int:
        return budget // NEWEST

    @property
    def ready(self) -> int:
        """Tokens from which on there are centroids."""
        return self.sink + self.train

    def since(self, length: int) -> int:
        """Behind the first tokens, where centroids are still to be made."""
        return length if length >= self.ready else min(length, self.sink)

    def grows(self, known: int, length: int) -> bool:
        """Where there are centroids."""
        return length >= self.ready

    def plan(self, config: ModelConfig) -> LayerPlan:
        """Raises SettingError where a key has no such pieces."""
        if config.head_dim % self.parts:
            raise SettingError(
                f"parts: found {self.parts}, expected a divisor of {config.head_dim}, the head "
                f"dimension of this model ({config.family})"
            )
        return super().plan(config)

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """Codes of every token, the centroids, and what a query head gives each token."""
        layers, heads, dim = len(plan.sparse_layers), config.num_kv_heads, config.head_dim
        sizes = layers, batch, heads, self.parts
        rows = capacity if layers else 0
        return super().buffers(plan, config, capacity, batch) | {
            "codes": Buffer((*sizes, capacity), torch.uint8),
            "centroids": Buffer((*sizes, 2**self.bits, dim // self.parts), torch.float32),
            "weights": Buffer((batch * config.num_heads, rows), torch.float32),
        }

    def runtime(self, setup: Setup) -> Runtime:
        return PQCacheRuntime(self, setup)


class PQCacheRuntime(IndexRuntime):
    """No CUDA graph: the host knows which rows are new."""

    method: PQCache
    codes: torch.Tensor
    centroids: torch.Tensor
    weights: torch.Tensor

    @cached_property
    def _by(self) -> list[Codes]:
        """What each group chooses by."""
        method, known = self.method, zip(self.index, self.codes, self.centroids)
        logits = self.weights.view(self.setup.batch, -1, self.setup.capacity)
        settings = method.gqa_reduce, self.scale, logits
        return [
            Codes(
                self.scores,
                chosen,
                *settings,
                codes=codes,
                centroids=centroids,
                first=method.sink,
            )
            for chosen, codes, centroids in known
        ]

    def absorb(self, group: int, b: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        method, start = self.method, max(first, self.method.sink)
        if first >= method.ready and self.as_they_are:
            known = self.centroids[group, b]
            if learn_code(self.codes[group, b], first, k, known, self.setup.backend):
                return
        centroids = self.centroids[group, b].flatten(0, 1)  # [Hkv * parts, C, D / parts]
        keys = self.coded(group, key_floats(k[:, start - first :]), start)
        pieces = keys.unflatten(2, (method.parts, -1)).transpose(1, 2).flatten(0, 1)
        if start < method.ready:
            given = pieces[:, : method.train], 2**method.bits, method.rounds
            centroids.copy_(cluster(*given, cosine=False)[1])
        codes = self.codes[group, b, :, :, start : first + k.shape[1]]
        codes.copy_(nearest(pieces, centroids, cosine=False).view(codes.shape))

    as_they_are = True  # whether `coded` changes nothing

    def coded(self, group: int, keys: torch.Tensor, first: int) -> torch.Tensor:
        """What is coded of keys float32 [Hkv, n, D] at positions from `first` on."""
        return keys

    def rank(self, group: int, q: torch.Tensor, lengths: list[int], ends: Ends) -> None:
        method, newest = self.method, self.method.newest(self.k)
        stops = [n - newest if n >= method.ready else method.sink for n in lengths]
        choose_by_codes(self._by[group], q, stops, ends, backend=self.setup.backend)

    def by(self, group: int) -> Codes | None:
        return self._by[group]

    def told(self, n: int, tail: int, stop: torch.Tensor, room: torch.Tensor) -> Now:
        method = self.method
        ranked = n - method.newest(self.k) if n >= method.ready else method.sink
        return Now(n, ranked, tail, stop, room, known=2**method.bits)

    def absorbed(self, group: int, k: torch.Tensor, v: torch.Tensor) -> list[tuple[str, Learnt]]:
        return [("code", told_code(self.codes[group, 0], k, self.centroids[group, 0]))]

    def tail_start(self, step: Step) -> torch.Tensor:
        """The newest tokens; all, where there are no centroids yet."""
        coded = step.visible >= self.method.ready
        return torch.where(coded, super().tail_start(step), 0).to(step.visible.dtype)

    def choosable(self, n: int) -> int:
        return n if n >= self.method.ready else 0

    def tokens_read(self, n: int) -> int:
        return super().tokens_read(n) if n >= self.method.ready else n

    def index_bytes(self, n: int) -> int:
        """Codes of every token, and the centroids."""
        heads, parts = self.codes.shape[2:4]
        return heads * parts * n + self.centroids[0, 0].nbytes
