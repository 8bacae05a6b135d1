"""ClusterKV: keys that point alike are one cluster; a step reads whole clusters, those whose
centroids its query likes best, until the budget is full.

Source: Liu et al., ClusterKV, DAC 2025, and sjtu-zhao-lab/ClusterKV (cluster_attention.py).
Published: layers 0 and 1 dense, 16 first tokens always read and in no cluster, k-means by cosine
with a cluster for every 80 tokens, clusters ranked by query times centroid, the last one that is
taken cut to the budget, tokens of the answer clustered after every 320 and read until then. There a
prompt is clustered at its end, all of it at once; here a segment of `segment` tokens at a time, in
prompts and answers alike, so that an index is made while rows are on the device, does not depend on
chunks, and follows the text back. Over a group the scores of clusters are reduced by `gqa_reduce`
to one choice per K/V head (the code: a choice per query head). Prompts are read densely.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from engine.bank.base import Step
from engine.base.checks import integer, one_of
from engine.methods.base import Runtime, Setup
from engine.methods.select.base import Buffer
from engine.methods.select.index.base import (
    REDUCTIONS,
    Indexed,
    IndexRuntime,
    whole_blocks,
)
from engine.methods.select.index.clusters import cluster
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from kernels.index.choose import choose_by_codes
from kernels.index.indexes import Codes, Ends
from kernels.index.step import Now
from kernels.rows.forms import key_floats


@dataclass(frozen=True)
class ClusterKV(Indexed):
    """Budget as Budgeted's, the first tokens included; what is in no cluster yet is read beside it.
    sink: first tokens, always read. segment: tokens that are clustered together; per: of so many
    one cluster is made. rounds: of k-means. dense_layers, gqa_reduce: as Indexed's.
    """

    full_prompts = True

    sink: int = 16
    segment: int = 320
    per: int = 80
    rounds: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        integer("sink", self.sink, 0)
        integer("segment", self.segment, 1)
        integer("per", self.per, 1, self.segment)
        integer("rounds", self.rounds, 0)
        one_of("gqa_reduce", self.gqa_reduce, REDUCTIONS[:-1])

    def budget(self, length: int) -> int:
        """The first tokens and one more at least."""
        return max(self.sink + 1, super().budget(length))

    @property
    def clusters(self) -> int:
        """Clusters of a segment."""
        return self.segment // self.per

    def segments(self, length: int) -> int:
        """Whole segments of `length` tokens."""
        return max(0, length - self.sink) // self.segment

    def since(self, length: int) -> int:
        """The first token of the segment that is not whole."""
        return min(length, self.sink + self.segments(length) * self.segment)

    def grows(self, known: int, length: int) -> bool:
        """Where a segment becomes whole."""
        return self.segments(length) > self.segments(known)

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """Every token's cluster, and the centroids."""
        layers, heads = len(plan.sparse_layers), config.num_kv_heads
        count = self.segments(capacity) * self.clusters
        return super().buffers(plan, config, capacity, batch) | {
            "member": Buffer((layers, batch, heads, capacity), torch.int32),
            "centroids": Buffer((layers, batch, heads, count, config.head_dim)),
        }

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """What waits for its segment is read beside the budget."""
        needs = super().needs(plan, config, capacity, itemsize)
        tail = max(needs.tail, whole_blocks(self.segment))
        return replace(needs, tail=tail, step_rows=(needs.step_rows or 0) + self.segment)

    def runtime(self, setup: Setup) -> Runtime:
        return ClusterKVRuntime(self, setup)


class ClusterKVRuntime(IndexRuntime):
    """No CUDA graph: the host knows which segments are whole."""

    method: ClusterKV
    member: torch.Tensor
    centroids: torch.Tensor

    @cached_property
    def _by(self) -> list[Codes]:
        """What each group chooses by."""
        method, known = self.method, zip(self.index, self.member, self.centroids)
        return [
            Codes(
                self.scores,
                chosen,
                method.gqa_reduce,
                codes=member.unsqueeze(2),
                centroids=centroids.unsqueeze(2),
                first=method.sink,
            )
            for chosen, member, centroids in known
        ]

    def absorb(self, group: int, b: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        method = self.method
        stop, start = first + k.shape[1], max(first, method.sink)
        before, after = method.segments(start), method.segments(stop)
        heads, size, count = len(k), method.segment, method.clusters
        rows = k[:, start - first : start - first + (after - before) * size]
        keys = key_floats(rows).unflatten(1, (after - before, size)).flatten(0, 1)
        member, centroids = cluster(keys, count, method.rounds)
        base = torch.arange(before, after, device=k.device)[:, None] * count
        places = member.view(heads, after - before, size) + base
        self.member[group, b, :, start : start + rows.shape[1]] = places.flatten(1).int()
        own = self.centroids[group, b, :, before * count : after * count]
        own.copy_(centroids.view(heads, -1, centroids.shape[-1]))

    def rank(self, group: int, q: torch.Tensor, lengths: list[int], ends: Ends) -> None:
        """A token has the score of its cluster, so that the best tokens are whole clusters, and of
        the last one its oldest.
        """
        method = self.method
        known = max(map(method.segments, lengths)) * method.clusters
        stops = [method.since(n) for n in lengths]
        choose_by_codes(self._by[group], q, stops, ends, known, self.setup.backend)

    def by(self, group: int) -> Codes | None:
        return self._by[group]

    def told(self, n: int, tail: int, stop: torch.Tensor, room: torch.Tensor) -> Now:
        known = self.method.segments(n) * self.method.clusters
        return Now(n, self.method.since(n), tail, stop, room, known=known)

    def tail_start(self, step: Step) -> torch.Tensor:
        """What is in no cluster; the newest token always, also where it completes a segment."""
        method, older = self.method, step.visible - 1
        whole = (older - method.sink).clamp(min=0) // method.segment * method.segment
        return (whole + method.sink).minimum(older)

    def choosable(self, n: int) -> int:
        return self.method.since(n - 1)

    def tokens_read(self, n: int) -> int:
        """The budget, and what is in no cluster."""
        older = self.choosable(n)
        return min(older, self.k) + n - older

    def index_bytes(self, n: int) -> int:
        """Every token's cluster, and the centroids."""
        heads, dim = self.member.shape[2], self.centroids.shape[-1]
        centroids = self.method.segments(n - 1) * self.method.clusters * dim
        size = self.centroids.element_size()
        return heads * (centroids * size + self.choosable(n) * self.member.element_size())
