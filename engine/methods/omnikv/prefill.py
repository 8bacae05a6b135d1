"""Chunked OmniKV-prefill: in the sparse layers a block of queries reads r x block past tokens,
chosen by the filter layers.

Source: the OmniKV paper, section D.10; the uniform rule over the block's queries. Decided here,
because the paper leaves it open: FULL, FILTER and WAIT layers stay dense; blocks begin at absolute
multiples of `prefill_block`; the tokens just before a block (its tail) are always seen; the
prompt's end is read densely, so that no boundary falls inside the question.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from engine.bank.base import Bank, PromptRows
from engine.bank.host.streamed_attention import attend_stream
from engine.methods.base import Setup
from engine.methods.omnikv.block_sparse import BlockSparse
from engine.methods.omnikv.prompt_rows import Block, cuts_of, named_rows, prompt_blocks, runs_of
from engine.methods.omnikv.settings import Settings
from engine.plan.layers import Role
from engine.plan.prefill_time import PrefillFlops
from kernels.launch.on_device import on_device
from kernels.prefill.dense import prefill_dense, prefill_dense_lse
from kernels.prefill.sparse import prefill_sparse
from kernels.select.column_scores import column_scores
from kernels.select.topk import select_topk

# blocks scored by one launch: 4 x 64 tiles fill a GPU from 8K rows on, and the scores stay at 16
# bytes a token
AT_ONCE = 4


# what a cut reads, its selections [1, blocks, k] as rows of that, and its blocks
Named = tuple[PromptRows, torch.Tensor, list[Block]]


class PrefillSelector:
    """Selections of one session's prefill: per group, one index row per sparse block of the chunk
    under way.
    """

    def __init__(self, method: Settings, setup: Setup):
        self.method, self.setup, self.plan = method, setup, setup.plan
        self.scale, self.softmax = setup.config.scale, setup.softmax
        self.block, ratio = method.prefill_block, method.prefill_ratio
        self.k = min(ratio * self.block, setup.capacity) if ratio else setup.capacity
        self.block_sparse = (
            BlockSparse(method, setup) if method.dense_layers == "block_sparse" else None
        )
        self.total: float = 0  # the prompt's length, infinite while it goes on
        self.blocks_now: list[Block] = []  # of the chunk under way
        self.scored: list[
            tuple[int, int, int]
        ] = []  # sparse blocks of the newest chunk that had any
        self.index: dict[int, torch.Tensor] = {}  # group -> [B, sparse blocks, k] int32
        # (group, first query) -> of each sparse run of the chunk, what it reads of host memory
        self.named: dict[tuple[int, int], list[list[Named]]] = {}
        self.scores = torch.empty(
            setup.batch, AT_ONCE, setup.capacity if ratio else 0, device=setup.device
        )
        # past tokens read by sparse layers, summed over blocks (for tests and tables)
        self.rows_read = 0

    @property
    def nbytes(self) -> int:
        """Bytes that live between chunks: the scores."""
        return self.scores.numel() * self.scores.element_size()

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """The blocks of a chunk at positions start .. stop-1."""
        return prompt_blocks(self.method, self.k, start, stop, self.total)

    def attend(self, layer: int, q: torch.Tensor, bank: Bank, start: int) -> torch.Tensor:
        """Prefill attention of one layer by its role. q [B, C, H, D] -> [B, C, H, D]."""
        role, group = self.plan.roles[layer], self.plan.group_of[layer]
        if layer == 0:
            self._begin(start, start + q.shape[1])
        # the last layer may see the chunk's last query only
        sparse = any(local is not None for _, last, local in self.blocks_now if last > start)
        if sparse and group is not None and self.plan.groups[group].layers:
            if role is not Role.SPARSE:
                return self._filter(layer, group, q, bank, start)
            if bank.on_host(layer):
                return self._sparse_from_host(layer, q, bank, start)
            return self._sparse(layer, group, q, bank, start)
        if bank.on_host(layer):
            return self._dense_from_host(layer, q, bank, start)
        k, v = bank.kv(layer)
        if self.block_sparse and role in (Role.FULL, Role.WAIT):
            return self.block_sparse.attend(layer, q, k, v, start, self.total)
        return prefill_dense(
            q, k, v, start, self.scale, self.setup.backend, softmax=self.softmax[layer]
        )

    def _begin(self, start: int, stop: int) -> None:
        """Begin a chunk; if it has sparse blocks, forget what an earlier one chose."""
        self.blocks_now = list(self.blocks(start, stop))
        sparse = [(*block[:2], block[2]) for block in self.blocks_now if block[2] is not None]
        if sparse:
            self.scored, self.index = sparse, {}
        self.named = {}

    def _filter(
        self, layer: int, group: int, q: torch.Tensor, bank: Bank, start: int
    ) -> torch.Tensor:
        """A dense layer that leaves its scores behind; from them one selection per block."""
        k, v = bank.kv(layer)
        softmax = self.softmax[layer]
        out, lse = prefill_dense_lse(q, k, v, start, self.scale, softmax, self.setup.backend)
        chosen = []
        for at in range(0, len(self.scored), AT_ONCE):
            blocks = self.scored[at : at + AT_ONCE]
            column_scores(
                q,
                k,
                lse,
                blocks,
                start,
                self.method.prefill_stride,
                self.scale,
                self.scores,
                backend=self.setup.backend,
                softmax=softmax,
            )
            chosen.append(self._select([local for *_, local in blocks]))
        self.index[group] = torch.cat(chosen, 1)
        return out

    def _select(self, stops: list[int]) -> torch.Tensor:
        """The k best positions below each block's stop: [B, blocks, k] int32."""
        batch, count, device = len(self.scores), len(stops), self.scores.device
        scores = self.scores[:, :count].reshape(batch * count, -1)
        hi = on_device(stops * batch, torch.int32, device)
        chosen = torch.empty(batch * count, self.k, dtype=torch.int32, device=device)
        select_topk(
            scores,
            torch.zeros_like(hi),
            hi,
            torch.full_like(hi, self.k),
            chosen,
            torch.empty_like(hi),
            backend=self.setup.backend,
        )
        return chosen.view(batch, count, self.k)

    def _sparse(
        self, layer: int, group: int, q: torch.Tensor, bank: Bank, start: int
    ) -> torch.Tensor:
        """Attend to runs of sparse blocks by one launch each, and to runs of dense ones
        likewise.
        """
        out = torch.empty_like(q)
        k, v = bank.kv(layer)
        given = self.scale, self.setup.backend, self.softmax[layer]
        for row, run in runs_of(self.blocks_now, start):
            first, last = run[0][0], run[-1][1]
            part = slice(first - start, last - start)
            if run[0][2] is None:
                out[:, part] = prefill_dense(q[:, part], k, v, first, *given)
                continue
            index = self.index[group][:, row : row + len(run)]
            blocks = [(low, high, local or 0, self.k) for low, high, local in run]
            out[:, part] = prefill_sparse(q[:, part], k, v, index, blocks, first, *given)
            self.rows_read += sum(self.k + low - (local or 0) for low, _, local in run)
        return out

    def _sparse_from_host(
        self, layer: int, q: torch.Tensor, bank: Bank, start: int
    ) -> torch.Tensor:
        """As `_sparse`, over a layer in host memory: only the rows that a run names come to the
        device, and behind them the newest ones.
        """
        out = torch.empty_like(q)
        group = self.plan.group_of[layer]
        assert group is not None, f"layer {layer} belongs to no group"
        runs = runs_of(self.blocks_now, start)
        for number, (_, run) in enumerate(runs):
            if run[0][2] is None:
                first = run[0][0]
                part = slice(first - start, run[-1][1] - start)
                dense = self._dense_from_host(layer, q[:, part], bank, first, len(runs) == 1)
                out[:, part] = dense
                continue
            named = self._named(group, bank, start)[number]
            # the last layer attends with fewer queries, or not at all
            members = [i for i in self.plan.groups[group].layers if layer < i < bank.num_layers - 1]
            following = members[0] if members and len(runs) == 1 else None
            brought = bank.gathered(layer, [rows for rows, _, _ in named], following)
            for (rows, index, blocks), (k, v) in zip(named, brought, strict=True):
                # the kernel counts positions as rows of what was brought
                shift = len(rows.tokens) - rows.first
                moved = [
                    (low + shift, high + shift, (local or 0) + shift, self.k)
                    for low, high, local in blocks
                ]
                part = slice(blocks[0][0] - start, blocks[-1][1] - start)
                out[:, part] = prefill_sparse(
                    q[:, part],
                    k,
                    v,
                    index,
                    moved,
                    moved[0][0],
                    self.scale,
                    backend=self.setup.backend,
                    softmax=self.softmax[layer],
                )
            self.rows_read += sum(self.k + low - (local or 0) for low, _, local in run)
        return out

    def _dense_from_host(
        self, layer: int, q: torch.Tensor, bank: Bank, first: int, alone: bool = True
    ) -> torch.Tensor:
        """Dense attention of queries from `first` on. alone: the chunk's only read of the layer."""
        softmax = self.softmax[layer]
        if self.setup.backend == "reference":
            return prefill_dense(q, *bank.kv(layer), first, self.scale, "reference", softmax)
        later = range(layer + 1, bank.num_layers - 1)  # those that attend in every chunk
        ahead = alone and any(bank.on_host(i) for i in later)
        begin = self.blocks_now[0][0]
        given = self.scale, begin, ahead, softmax, self.setup.backend
        return attend_stream(q, bank, layer, first, *given)

    def _named(self, group: int, bank: Bank, start: int) -> list[list[Named]]:
        """Per run of the chunk, what its cuts read; worked out once for all layers of a group."""
        if (group, start) not in self.named:
            begin, index = self.blocks_now[0][0], self.index[group][0]
            runs: list[list[Named]] = []
            for row, run in runs_of(self.blocks_now, start):
                runs.append([])
                if run[0][2] is None:
                    continue
                for cut in cuts_of(row, run, self.k, begin, bank.room):
                    chosen = index[cut.row : cut.row + len(cut.blocks)]
                    # the scores have served: the layers of a group come before the next filter
                    rows, at = named_rows(chosen, cut, begin, self.scores[0])
                    runs[-1].append((rows, at, cut.blocks))
            self.named[group, start] = runs
        return self.named[group, start]

    def selections(self) -> dict[tuple[int, int], torch.Tensor]:
        """{(filter layer, block's first position): int64 [k]} of the newest chunk that chose,
        sequence 0.
        """
        return {
            (self.plan.groups[group].filter_layer, first): index[0, n].long().cpu()
            for group, index in self.index.items()
            for n, (first, *_) in enumerate(self.scored)
        }

    def flops(self, flops: PrefillFlops, start: int, stop: int) -> tuple[float, float]:
        """(linear, attention) operations of positions start .. stop-1: dense layers, scoring (half
        an attention), sparse layers.
        """
        linear, attention = flops.parts(start, stop)
        sparse = sum(1 for layer in self.plan.sparse_layers if layer < flops.layers)
        filters = sum(1 for group in self.plan.groups if group.layers)
        if self.block_sparse:
            roles = self.plan.roles[: flops.layers]
            dense = roles.count(Role.FULL) + roles.count(Role.WAIT)
            attention -= dense * self.block_sparse.saved(flops, start, stop, self.total)
        for first, last, local in self.blocks(start, stop):
            if local is None:
                continue
            count = last - first
            pairs = count * (self.k + first - local + (count + 1) / 2)
            attention += sparse * (flops.per_pair * pairs - flops.pairs(first, last))
            scored = math.ceil(count / self.method.prefill_stride) * local
            attention += filters * flops.per_pair * 0.5 * scored
        return linear, attention
