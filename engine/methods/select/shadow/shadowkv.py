"""ShadowKV: K before rotation is held in few numbers a token, V stays where the bank has it; the
mean of each chunk of keys says which chunks a step rebuilds.

Source: Sun et al., ShadowKV, ICML 2025 (arXiv 2410.21465), Algorithms 1 and 2. At a prompt's end K
before RoPE, all K/V heads side by side, is decomposed to rank 160; the mean of each 8 keys after
RoPE is a landmark. The 48 chunks of which a key points furthest away from its landmark are
outliers, whose K and V are held as they are, as are the prompt's last 32 tokens and the answer. A
step takes, per K/V head, the chunks with the largest softmax of query times landmark, the maximum
over a group, rebuilds their K from the low rank, and brings their V. Prompts are read densely.

Differs: the singular vectors come from K's Gram matrix, which two passes over the bank make in
blocks, so that no K of a whole prompt is in float32 at once. Of an answer the newest `answer`
tokens are exact, older ones join the index in the basis that is there; where they have doubled the
text, it is made anew. So a later prompt's end makes all of it anew too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import functional

from engine.bank.base import Bank, Step
from engine.base.checks import integer, one_of
from engine.base.errors import SettingError
from engine.methods.base import Runtime, Setup
from engine.methods.select.across.by_logits import require_room
from engine.methods.select.base import Budgeted, Buffer, Selecting, Selection
from engine.methods.select.index.base import REDUCTIONS
from engine.methods.select.shadow.landmarks import Outliers, furthest, landmarks
from engine.methods.select.shadow.low_rank import before_rotation, leading, rebuilt
from engine.model.config.config import ModelConfig
from engine.model.rope import Rotary
from engine.plan.layers import LayerPlan, single_layer_groups
from engine.plan.needs import Needs
from engine.plan.placement import part_bytes, value_bytes
from kernels.attention.sparse import decode_sparse
from kernels.launch.on_device import on_device
from kernels.rows.forms import key_floats, unpack, unpack_keys
from kernels.select.topk import select_topk
from kernels.sketch.rebuilt import LowRank, Rows, attend_rebuilt, rebuilds
from kernels.sketch.shares import landmark_shares

RANK = 160
AT_ONCE = 1024  # tokens of K in float32 at a time: 4 MB at 8 heads of 128


@dataclass(frozen=True)
class ShadowKV(Budgeted):
    """Budget as Budgeted's, in whole chunks, of tokens whose K is rebuilt; outliers and exact
    tokens are read beside it. rank: numbers per token, None for 160 or all that K has. chunk:
    tokens of a landmark. outliers: chunks held as they are. recent: last tokens of a prompt that
    are exact; answer: newest tokens of an answer that are. dense_layers: first layers that read
    everything. gqa_reduce: how shares of a group's query heads become one: "max" | "mean" | "sum".
    """

    full_prompts = True

    rank: int | None = None
    chunk: int = 8
    outliers: int = 48
    recent: int = 32
    answer: int = 256
    dense_layers: int = 0
    gqa_reduce: str = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None:
            integer("rank", self.rank, 1)
        integer("chunk", self.chunk, 1, AT_ONCE)
        integer("outliers", self.outliers, 0)
        integer("recent", self.recent, 1)
        integer("answer", self.answer, 1)
        integer("dense_layers", self.dense_layers, 0)
        one_of("gqa_reduce", self.gqa_reduce, REDUCTIONS[:-1])
        if self.tokens is not None and self.tokens < self.chunk:
            raise SettingError(
                f"tokens: found {self.tokens}, expected at least a chunk of {self.chunk} tokens"
            )

    def plan(self, config: ModelConfig) -> LayerPlan:
        """FULL below `dense_layers`; every layer above is SPARSE and chooses for itself. Raises
        SettingError where rank is above the width of K, or tokens above any context.
        """
        width = config.num_kv_heads * config.head_dim
        if self.rank is not None and self.rank > width:
            raise SettingError(
                f"rank: found {self.rank}, expected at most {width}: K of this model has "
                f"{config.num_kv_heads} heads of {config.head_dim}"
            )
        require_room(self, config)
        layers = config.num_layers
        others = config.local_layers, config.recurrent_layers
        return single_layer_groups(layers, range(self.dense_layers, layers), *others)

    def budget(self, length: int) -> int:
        """Whole chunks, at least one."""
        return max(1, super().budget(length) // self.chunk) * self.chunk

    def spans(self, end: int, n: int) -> tuple[int, int]:
        """(tokens whose K makes the basis, tokens in the index) at n tokens, of which the latest
        prompt ended at `end`; (0, 0) where there is no index.
        """
        size = self.chunk
        prompt, answer = (
            max(0, here) // size * size for here in (min(end, n) - self.recent, n - self.answer)
        )
        stop = max(prompt, answer)
        base = max(prompt, -(-self.answer // size) * size)
        if stop < base:
            return 0, 0
        while 2 * base <= stop:
            base *= 2
        return base, stop

    def leaves_out(self, indexed: int, budget: int) -> bool:
        """Whether a budget does not cover so many tokens of an index."""
        return indexed > budget + self.outliers * self.chunk

    def buffers(
        self, plan: LayerPlan, config: ModelConfig, capacity: int, batch: int = 1
    ) -> dict[str, Buffer]:
        """Coefficients of every token and the basis, landmarks (1 / chunk of K), outliers, and of
        one layer the scores of chunks, of each its chosen chunks.
        """
        layers, heads, dim = len(plan.sparse_layers), config.num_kv_heads, config.head_dim
        each, chunks, width = (layers, batch), capacity // self.chunk, heads * dim
        held = min(self.outliers, chunks)
        rank = min(RANK, width) if self.rank is None else self.rank
        kept = Buffer((*each, heads, held * self.chunk, dim))
        most = min(capacity, self.budget(capacity)) // self.chunk
        return {
            "coefficients": Buffer((*each, chunks * self.chunk, rank)),
            "basis": Buffer((*each, rank, width), torch.float32),
            "landmarks": Buffer((*each, heads, chunks, dim)),
            "outliers": Buffer((*each, heads, held), torch.int64),
            "outlier_k": kept,
            "outlier_v": kept,
            "scores": Buffer((batch * heads, chunks if layers else 0), torch.float32),
            "index": Buffer((layers, batch * heads, most), torch.int32),
        }

    def needs(self, plan: LayerPlan, config: ModelConfig, capacity: int, itemsize: int) -> Needs:
        """Each choice may bring V of its own; what is exact lies in a ring on the device."""
        needs = super().needs(plan, config, capacity, itemsize)
        values = config.num_kv_heads * needs.selected * value_bytes(config, itemsize)
        held = self.outliers * self.chunk if needs.selected else 0
        return replace(
            needs,
            selected=min(capacity, needs.selected + held),
            whole_layer=False,
            step_rows=-(-values // part_bytes(config, itemsize)),
            tail=max(self.answer, self.recent) + self.chunk,
            sliding=True,
            capped=True,
            recurrent=True,
        )

    def prompt_bytes(self, config: ModelConfig, capacity: int, chunk: int, itemsize: int) -> int:
        """A block of K in float32, turned back, and the Gram matrix with its eigenvectors."""
        width = config.num_kv_heads * config.head_dim
        return 4 * width * (8 * min(AT_ONCE, capacity) + 9 * width)

    def prompt_rows(
        self,
        capacity: int,
        begin: int,
        stop: int,
        total: float,
        room: int,
        first: int | None = None,
    ) -> int:
        """The past, and at a prompt's end all that the index is made of, twice; of the last layer
        the newest chunk is on the device still.
        """
        base, indexed = self.spans(stop, stop)
        if stop != total or not self.leaves_out(indexed, self.budget(stop)):
            return begin
        return begin + 2 * (base if first is None else min(base, begin))

    def runtime(self, setup: Setup) -> Runtime:
        return ShadowRuntime(self, setup)


class ShadowRuntime(Selecting):
    """An index is made at a prompt's end, and by the first step where a layer has none (in a fork,
    in a saved session). No CUDA graph: the host knows which chunks are new.
    """

    method: ShadowKV
    coefficients: torch.Tensor
    basis: torch.Tensor
    landmarks: torch.Tensor
    outliers: torch.Tensor
    outlier_k: torch.Tensor
    outlier_v: torch.Tensor
    scores: torch.Tensor
    index: torch.Tensor

    def __init__(self, method: ShadowKV, setup: Setup):
        super().__init__(method, setup)
        self.rotary = Rotary(setup.config, setup.device)
        self.ends = [0] * setup.batch  # of the latest prompts, in tokens
        # of each index: tokens whose K made its basis (0: there is none), tokens in it
        self._known = [[(0, 0)] * setup.batch for _ in self.plan.groups]

    # ---------------------------------------------------------------- the index

    def begin_prompt(self, start: int, stop: int, more: bool = False) -> None:
        self.truncate(start)

    def truncate(self, length: int) -> None:
        size = self.method.chunk
        for known in self._known:
            for b, (base, stop) in enumerate(known):
                known[b] = (base, min(stop, length // size * size)) if base <= length else (0, 0)

    def end_prompt(self, length: int, step: Step | None = None) -> None:
        """Make the index of every layer."""
        super().end_prompt(length, step)
        self.ends = [length] * self.setup.batch
        if step is None or not any(self._stops([length])):
            return
        for layer in self.plan.sparse_layers:
            group = self.plan.group_of[layer]
            assert group is not None
            self.learn(group, layer, step.bank, [length] * self.setup.batch)

    def _stops(self, lengths: list[int]) -> list[int]:
        """Tokens of each sequence that a step chooses from: those in the index, or none where the
        budget covers them.
        """
        stops = [self.method.spans(end, n)[1] for end, n in zip(self.ends, lengths)]
        return [stop if self.method.leaves_out(stop, self.k) else 0 for stop in stops]

    def learn(self, group: int, layer: int, bank: Bank, lengths: list[int]) -> None:
        """Bring the index of a layer up to date at so many tokens."""
        for b, n in enumerate(lengths):
            base, stop = self.method.spans(self.ends[b], n)
            made, known = self._known[group][b]
            if not base:
                continue
            if made != base:
                known = self._make(group, layer, bank, b, base)
            for first in range(known, stop, self._at_once):
                last = min(stop, first + self._at_once)
                self.absorb(group, layer, b, first, bank.rows(layer, first, last)[0][b])
            self._known[group][b] = base, max(known, stop)

    @property
    def _at_once(self) -> int:
        return AT_ONCE // self.method.chunk * self.method.chunk

    def _make(self, group: int, layer: int, bank: Bank, b: int, stop: int) -> int:
        """Make basis, coefficients, landmarks and outliers of the first `stop` tokens."""
        basis, chunk, held = self.basis[group, b], self.method.chunk, self.outliers.shape[-1]
        gram = basis.new_zeros(basis.shape[1], basis.shape[1])
        self._known[group][b] = 0, 0  # an interrupt leaves none, and not the one before
        span = layer, 0, stop, self._at_once, False
        for first, k, _ in bank.blocks(*span):
            rows = before_rotation(k[b], first, self.rotary, layer)
            gram.addmm_(rows.mT, rows)
        basis.copy_(leading(gram, len(basis)))
        worst: list[Outliers] = []
        for first, k, v in bank.blocks(*span):
            cosines = self.absorb(group, layer, b, first, k[b])
            numbers = torch.arange(cosines.shape[1], device=k.device) + first // chunk
            rows_k, rows_v = (
                part.unflatten(1, (-1, chunk))
                for part in (unpack_keys(k[b], self.setup.dtype), unpack(v[b], self.setup.dtype))
            )
            found = Outliers(cosines, numbers.expand_as(cosines), rows_k, rows_v)
            worst = [furthest([*worst, found], held)]
        count = worst[0].chunks.shape[1]
        self.outliers[group, b, :, :count] = worst[0].chunks
        for mine, rows in ((self.outlier_k, worst[0].k), (self.outlier_v, worst[0].v)):
            mine[group, b, :, : count * chunk] = rows.flatten(1, 2)
        return stop

    def absorb(self, group: int, layer: int, b: int, first: int, k: torch.Tensor) -> torch.Tensor:
        """Put whole chunks of K, rows [Hkv, n, width] from position `first` on, into the index; the
        least cosines of their landmarks, float32 [Hkv, n / chunk].
        """
        chunk, stop = self.method.chunk, first + k.shape[1]
        rows = before_rotation(k, first, self.rotary, layer)
        self.coefficients[group, b, first:stop] = rows @ self.basis[group, b].mT
        means, cosines = landmarks(key_floats(k), chunk)
        self.landmarks[group, b, :, first // chunk : stop // chunk] = means
        return cosines

    # ---------------------------------------------------------------- a step

    def select(self, layer: int, q: torch.Tensor, step: Step) -> Selection:
        group, lengths = self.plan.group_of[layer], step.lengths
        assert group is not None
        stops = self._stops(lengths)
        if not any(stops):
            return Selection(None, None, step.visible)
        self.learn(group, layer, step.bank, lengths)
        chunks = [stop // self.method.chunk for stop in stops]
        self.score(group, layer, q[:, -1], chunks)
        index, room = self.index[group], self.k // self.method.chunk
        heads = len(index) // len(q)
        tail, first, stop, wanted = step.once("chunks", lambda: self._ends(stops, heads, q.device))
        counts, backend = torch.empty_like(stop), self.setup.backend
        select_topk(self.scores, first, stop, wanted, index, counts, backend=backend)
        chosen = index.view(len(q), heads, -1)[:, :, :room]
        return Selection(chosen, counts[::heads], tail, unit=self.method.chunk)

    def _ends(self, stops: list[int], heads: int, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Where a step's tail begins, int32 [B], and between which chunks, and how many, each head
        takes, int32 [B * Hkv].
        """
        chunks, room = [stop // self.method.chunk for stop in stops], self.k // self.method.chunk
        free = [min(room, count - self._held(count)) for count in chunks]
        stop, wanted = (
            on_device(each, torch.int32, device).repeat_interleave(heads) for each in (chunks, free)
        )
        return on_device(stops, torch.int32, device), torch.zeros_like(stop), stop, wanted

    def _held(self, chunks: int) -> int:
        """Outliers of an index of so many chunks."""
        return min(self.outliers.shape[-1], chunks)

    def score(self, group: int, layer: int, q: torch.Tensor, chunks: list[int]) -> None:
        """Fill self.scores for the first chunks[b] chunks of every sequence, outliers lowest. q
        [B, H, D].
        """
        heads = self.landmarks.shape[2]
        for b, scores in enumerate(self.scores.view(len(q), heads, -1)):
            marks = self.landmarks[group, b, :, : chunks[b]]
            out = self.outliers[group, b, :, : self._held(chunks[b])]
            how = self.softmax[layer], self.method.gqa_reduce, self.setup.backend
            landmark_shares(q[b], marks, out, scores[:, : chunks[b]], self.scale, *how)

    def attend_kept(
        self, layer: int, q: torch.Tensor, step: Step, tail_start: torch.Tensor
    ) -> torch.Tensor:
        """A layer that has no index reads everything."""
        if self.plan.group_of[layer] is None:
            return self.attend_dense(layer, q, step)
        return super().attend_kept(layer, q, step, tail_start)

    def attend_selection(
        self, layer: int, q: torch.Tensor, step: Step, chosen: Selection
    ) -> torch.Tensor:
        """Over outliers, chosen chunks with their K rebuilt, and the exact tail, laid side by
        side.
        """
        group, dtype = self.plan.group_of[layer], self.setup.dtype
        assert group is not None
        if self._rebuilds(layer, q, step):
            return self._attend_rebuilt(group, layer, q, step, chosen)
        index, counts = chosen.rows()
        tokens = index.clamp(min=0).long()
        k = rebuilt(self.coefficients[group], self.basis[group], tokens, self.rotary, layer)
        v = unpack(step.bank.picked_values(layer, index, counts), dtype)
        tail_k, tail_v = self._tail(layer, step, chosen.tail_start)
        outlier_k, outlier_v = self.outlier_k[group], self.outlier_v[group]
        rows_k = torch.cat([outlier_k, k.to(dtype), tail_k], 2)
        rows_v = torch.cat([outlier_v, v, tail_v], 2)
        order, kept = self._kept(chosen.tail_start, counts, index.shape[2])
        begin = torch.full_like(kept, rows_k.shape[2] - tail_k.shape[2])
        return decode_sparse(
            q,
            rows_k,
            rows_v,
            order,
            kept,
            begin,
            begin + step.visible - chosen.tail_start,
            self.scale,
            scratch=self.setup.scratch,
            backend=self.setup.backend,
            softmax=self.softmax[layer],
        )

    def _rebuilds(self, layer: int, q: torch.Tensor, step: Step) -> bool:
        """Whether the C++ kernel attends to a layer's choice."""
        given = self.setup.dtype, step.bank.dtype, q.shape[3], q.device.type
        return q.shape[1] == 1 and rebuilds(self.setup.backend, *given)

    def _attend_rebuilt(
        self, group: int, layer: int, q: torch.Tensor, step: Step, chosen: Selection
    ) -> torch.Tensor:
        """Each sequence by one call: no row is copied."""
        bank, host, size = step.bank, step.bank.on_host(layer), self.method.chunk
        index, counts = chosen.rows()
        brought = bank.picked_values(layer, index, counts) if host else bank.values(layer)
        tokens = index.clamp(min=0).long()
        cos, sin = self.rotary.at(tokens, layer=layer)
        out, ends = torch.empty_like(q), zip(chosen.tail_start.tolist(), counts.tolist())
        assert chosen.index is not None
        for b, (first, count) in enumerate(ends):
            turns = cos[b, :, :count].contiguous(), sin[b, :, :count].contiguous()
            mine, held = chosen.index[b, :, : count // size], self._held(first // size) * size
            basis = self.coefficients[group, b], self.basis[group, b], mine, size
            k, v = bank.rows(layer, first, step.lengths[b])
            given = (
                Rows(self.outlier_k[group, b, :, :held], self.outlier_v[group, b, :, :held]),
                LowRank(*basis, *turns, brought[b], host),
                Rows(k[b], v[b]),
            )
            out[b] = attend_rebuilt(q[b], *given, self.scale, self.softmax[layer])
        return out

    def _kept(
        self, tail: torch.Tensor, counts: torch.Tensor, most: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Which rows of outliers and then of chosen chunks count: (their numbers int32 [B, 1, n],
        ascending, how many int32 [B]).
        """
        held = self.outlier_k.shape[3]
        place = torch.arange(held + most, device=tail.device)
        inside = torch.where(place < held, place < tail[:, None], place - held < counts[:, None])
        order = (~inside).byte().argsort(dim=1, stable=True)
        return order.int()[:, None], inside.sum(1).int()

    def _tail(
        self, layer: int, step: Step, start: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [B, Hkv, T, D] of the exact tokens of each sequence, zeros behind the last."""
        spans = list(zip(start.tolist(), step.lengths))
        most, found = max(n - first for first, n in spans), []
        for b, (first, n) in enumerate(spans):
            k, v = (part[b : b + 1] for part in step.bank.rows(layer, first, n))
            rows = unpack_keys(k, self.setup.dtype), unpack(v, self.setup.dtype)
            more = 0, 0, 0, most - (n - first)
            found.append([functional.pad(part, more) for part in rows])
        return torch.cat([k for k, _ in found]), torch.cat([v for _, v in found])

    # ---------------------------------------------------------------- what a step read

    def tail_start(self, step: Step) -> torch.Tensor:
        stops = self._stops(step.lengths)
        return on_device(stops, torch.int32, step.visible.device)

    def chosen_rows(self, layer: int) -> torch.Tensor:
        """Outliers too."""
        group = self.plan.group_of[layer]
        assert group is not None, f"layer {layer} belongs to no group"
        rows = super().chosen_rows(layer)
        if self.chosen[group].index is None:
            return rows
        count = self._held(int(self.chosen[group].tail_start[0]) // self.method.chunk)
        size = self.method.chunk
        inside = torch.arange(size, device=rows.device)
        held = self.outliers[group, 0, :, :count].unsqueeze(2) * size + inside
        every = torch.cat([held.flatten(1), rows], 1)
        return every.sort(1).values

    def tokens_read(self, n: int) -> int:
        """Outliers, the budget and what is exact; everything while they cover it."""
        stop = self._stops([n])[0]
        if not stop:
            return n
        return self.method.outliers * self.method.chunk + self.k + n - stop

    def choosing_bytes(self, n: int) -> int:
        """Landmarks of every chunk and the basis, where the budget does not cover everything."""
        stop = self._stops([n])[0]
        if not stop:
            return 0
        marks = self.landmarks[0, 0, :, : stop // self.method.chunk]
        each = marks.numel() * marks.element_size() + self.basis[0, 0].nbytes
        return len(self.plan.sparse_layers) * each

    # ---------------------------------------------------------------- going back

    def state(self) -> Any:
        """k, and where the latest prompt ended."""
        return self.k, self.ends[0]

    def load(self, state: Any, length: int | None) -> None:
        self.k, end = state
        self.ends = [end] * self.setup.batch

    def copy_from(self, other: Any, sequence: int = 0) -> None:
        """The index is made anew."""
        self.k, self.ends[sequence] = other.state()
        for known in self._known:
            known[sequence] = 0, 0
