"""RetroInfer: a wave index. Keys that point alike are a cluster; a step reads the best clusters
whole, attends to the next ones as a mean each, and leaves the rest.

Source: Chen et al., RetroInfer (2025), sections 3 and 4, with the settings that its authors
publish: clusters are made segment by segment of 8,192 tokens, one for every 16, by k-means by
cosine, for each K/V head; a step ranks them by query times centroid. The steady zone, here the
first 4 tokens and those that wait for their segment, is always read; the retrieval zone, the best
clusters, too; the estimation zone, the next 23.2% of the clusters, stands in the softmax as
centroid, mean of V and number of tokens. Of all else nothing is read. The paper's index lies in
host memory and serves a buffer of blocks; here the bank brings the rows that a step chose, and the
index lies on the device. Differs: the retrieval zone is as many of the best clusters as fit into a
budget of tokens (there a number of clusters, 1.8% of all); what is in no segment yet is read
exactly (there in the local window, a prompt's rest being a segment of its own, so that an index
depends on how a text came); a group's query heads make one ranking, by `gqa_reduce`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from engine.bank.base import SparseRows, Step
from engine.base.checks import fraction, one_of
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.select.base import Buffer, Selection
from engine.methods.select.index.base import grouped, reduced
from engine.methods.select.index.clusterkv import ClusterKV, ClusterKVRuntime
from engine.methods.select.wave.zones import NOTHING, zones_of
from engine.model.config.config import ModelConfig
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from kernels.attention.ragged import decode_ragged
from kernels.index.indexes import Codes
from kernels.rows.forms import as_bytes, floats, key_floats, stored, stored_keys
from kernels.select.topk import select_topk


@dataclass(frozen=True)
class RetroInfer(ClusterKV):
    """Budget, dense_layers, gqa_reduce, sink, segment, per and rounds as ClusterKV's. estimate:
    part of the clusters that is estimated behind those that are read. rank: "centroid" | "exact":
    the control, in which clusters are ranked by the attention that their tokens get, for which
    every K is read; its layers stay on the device.
    """

    full_prompts = True

    sink: int = 4
    segment: int = 8192
    per: int = 16
    estimate: float = 0.232
    rank: str = "centroid"

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction("estimate", self.estimate, zero=True)
        one_of("rank", self.rank, ("centroid", "exact"))
        if self.tokens is not None and self.tokens <= self.sink:
            raise SettingError(
                f"tokens: found {self.tokens}, expected more than the {self.sink} first tokens "
                "(sink), which are inside the budget"
            )

    @property
    def cannot_draft(self) -> str:
        return "a draft would estimate what verification reads; use clusterkv"

    def estimated(self, clusters: int) -> int:
        """Of so many clusters, those in the estimation zone."""
        return int(self.estimate * clusters)

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """ClusterKV's, whose centroids are means of K, the means of V, clusters' sizes, and what a
        step estimates.
        """
        found = super().buffers(plan, config, capacity, batch)
        means = found["centroids"]
        *sizes, clusters, _ = means.shape
        zone = (*sizes, self.estimated(clusters))
        return found | {
            "values": means,
            "sizes": Buffer((*sizes, clusters), torch.int32),
            "estimated": Buffer(zone, torch.int32),
            "logs": Buffer(zone, torch.float32),
        }

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """With exact ranks no layer leaves the device."""
        needs = super().needs(plan, config, capacity, itemsize)
        return replace(needs, offload=()) if self.rank == "exact" else needs

    def runtime(self, setup: Setup) -> Runtime:
        return RetroInferRuntime(self, setup)


class RetroInferRuntime(ClusterKVRuntime):
    """Buffers beside ClusterKV's: values [layers, B, Hkv, C, D], the mean V of every cluster, sizes
    int32 [layers, B, Hkv, C], and of the last step estimated int32 and logs float32 [layers, B,
    Hkv, E], the clusters of the estimation zone and the log of how many tokens they have. No CUDA
    graph.
    """

    method: RetroInfer
    values: torch.Tensor
    sizes: torch.Tensor
    estimated: torch.Tensor
    logs: torch.Tensor

    def absorb(self, group: int, b: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Cluster K, and note what every new cluster holds: segment by segment, so that sums do not
        depend on how many come at once.
        """
        super().absorb(group, b, first, k, v)
        method, start = self.method, max(first, self.method.sink)
        size, count = method.segment, method.clusters
        for number in range(method.segments(start), method.segments(first + k.shape[1])):
            at = method.sink + number * size
            member = self.member[group, b, :, at : at + size].long() % count
            sets = F.one_hot(member, count).mT.to(torch.float32).contiguous()
            sizes, own = sets.sum(-1), slice(number * count, (number + 1) * count)
            self.sizes[group, b, :, own] = sizes.int()
            rows = slice(at - first, at - first + size)
            for means, part in (
                (self.centroids, key_floats(k[:, rows])),
                (self.values, floats(v[:, rows])),
            ):
                sums = sets @ part.float().contiguous()
                means[group, b, :, own].copy_(sums / sizes.clamp(min=1).unsqueeze(-1))

    # ---------------------------------------------------------------- a step

    def by(self, group: int) -> Codes | None:
        """None: ClusterKV's call neither cuts a list at whole clusters nor estimates."""
        return None

    def select(self, layer: int, q: torch.Tensor, step: Step) -> Selection:
        group, lengths = self.plan.group_of[layer], step.lengths
        assert group is not None
        self.learn(group, layer, step.bank, lengths)
        if max(map(self.choosable, lengths)) <= self.k:
            return Selection(None, None, step.visible)
        index, tail = self.index[group], self.tail_start(step)
        scores = self.scores.view(len(q), -1, self.scores.shape[1])
        given = group, layer, q[:, -1], step
        wanted = torch.cat([self._zones(*given, b, scores[b]) for b in range(len(q))])
        stop, counts = tail.repeat_interleave(scores.shape[1]), torch.empty_like(wanted)
        sizes = torch.zeros_like(stop), stop, wanted
        select_topk(self.scores, *sizes, index, counts, backend=self.setup.backend)
        counts = counts.view(len(q), -1)
        return Selection(index.view(*counts.shape, -1), counts, tail)

    def _zones(
        self, group: int, layer: int, q: torch.Tensor, step: Step, b: int, scores: torch.Tensor
    ) -> torch.Tensor:
        """Rank sequence b's clusters by q [B, H, D], and note what is estimated. Tokens get the
        place of their cluster as scores [Hkv, capacity], the first one the highest, and the first
        tokens a higher one. Returns the tokens that each head reads before the tail, int32 [Hkv].
        """
        method = self.method
        whole = method.segments(int(step.visible[b]) - 1)
        count, stop = whole * method.clusters, method.sink + whole * method.segment
        sizes, most = self.sizes[group, b, :, :count], method.estimated(count)
        member = self.member[group, b, :, method.sink : stop].long()
        if method.rank == "exact":
            found = self._true(layer, q[b], step, b, member, count)
        else:
            found = grouped(q[b], len(sizes)) @ self.centroids[group, b, :, :count].float().mT
            found = reduced(found, method.gqa_reduce)
        zones = zones_of(found, sizes, self.k - method.sink, most)
        self.estimated[group, b, :, :most] = zones.estimated.int()
        self.logs[group, b, :, :most] = zones.logs
        scores[:, : method.sink] = float("inf")
        scores[:, method.sink : stop] = -zones.place.gather(1, member).float()
        return zones.tokens + method.sink

    def _true(
        self, layer: int, q: torch.Tensor, step: Step, b: int, member: torch.Tensor, count: int
    ) -> torch.Tensor:
        """The attention of a group's query heads together to each cluster: float32 [Hkv, C]."""
        n = int(step.visible[b])
        k = key_floats(step.bank.kv(layer, step.bucket)[0][b, :, :n])
        weights = torch.softmax(grouped(q, len(k)) @ k.mT * self.scale, -1).sum(1)
        sink = self.method.sink
        mine = weights[:, sink : sink + member.shape[1]]
        return torch.zeros(len(k), count, device=q.device).scatter_add_(1, member, mine)

    def attend_selection(
        self, layer: int, q: torch.Tensor, step: Step, chosen: Selection
    ) -> torch.Tensor:
        """Attention to the rows that are read and the means of those that are estimated."""
        rows = step.bank.picked(layer, *chosen.rows(), chosen.tail_start, step)
        group = self.plan.group_of[layer]
        assert group is not None
        lengths = step.lengths
        found = [self._over(group, b, n, q[b : b + 1], rows) for b, n in enumerate(lengths)]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _over(self, group: int, b: int, n: int, q: torch.Tensor, rows: SparseRows) -> torch.Tensor:
        """Of sequence b, which has n tokens; q [1, 1, H, D]. A list that is shorter than another is
        filled up with the newest row, which counts no more for it.
        """
        k, v, heads = rows.k[b], rows.v[b], rows.k.shape[1]
        tail, stop = int(rows.tail_start[b]), int(rows.stop[b])
        zone = slice(0, self.method.estimated(self.method.segments(n - 1) * self.method.clusters))
        estimated, logs = (t[group, b, :, zone] for t in (self.estimated, self.logs))
        # no more than the longest list: tiers leave different room behind it
        entry = torch.arange(int(rows.counts[b].max()), device=q.device)
        mine = entry < rows.counts[b].unsqueeze(1)
        newest = torch.arange(tail, stop, device=q.device).expand(heads, -1)
        places = torch.cat([rows.index[b, :, : len(entry)].where(mine, stop - 1).long(), newest], 1)
        each = torch.arange(heads, device=q.device).unsqueeze(1)
        read = torch.zeros(places.shape, device=q.device)
        read[:, : len(entry)].masked_fill_(~mine, NOTHING)
        chosen = estimated.long()
        mean_k = stored_keys(self.centroids[group, b][each, chosen].to(q.dtype), k)
        mean_v = stored(self.values[group, b][each, chosen].to(q.dtype), v)
        rows_k, rows_v = (
            torch.cat([as_bytes(mean), as_bytes(held)[each, places]], 1).view(held.dtype)
            for mean, held in ((mean_k, k), (mean_v, v))
        )
        width = estimated.shape[1] + places.shape[1]
        starts = torch.arange(heads, device=q.device) * width
        lengths = torch.full_like(starts, width)
        weights = torch.cat([logs, read], 1).flatten()
        # the session's serves as many rows as its bank has
        scratch = self.setup.scratch if width <= self.setup.capacity else None
        flat = rows_k.flatten(0, 1), rows_v.flatten(0, 1), starts, lengths, width
        backend = self.setup.backend
        return decode_ragged(q, *flat, self.scale, scratch, backend=backend, logs=weights)

    # ---------------------------------------------------------------- what a step read

    def index_bytes(self, n: int) -> int:
        """ClusterKV's, the sizes, and the means of V of what is estimated."""
        heads, dim, size = self.values.shape[2], self.values.shape[-1], self.values.element_size()
        count = self.method.segments(n - 1) * self.method.clusters
        more = count * self.sizes.element_size() + self.method.estimated(count) * dim * size
        return super().index_bytes(n) + heads * more
