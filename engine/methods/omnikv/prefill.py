"""Chunked OmniKV-prefill: in the sparse layers a block of queries reads r x block rows of the past,
chosen by the filter layers.

Source: the OmniKV paper, section D.10 (METHODS.md items 27-28); the uniform rule over the block's
queries. What the paper leaves open is decided here: FULL, FILTER and WAIT layers stay dense; blocks
begin at absolute multiples of `prefill_block`; the rows just before a block (the tail of DESIGN.md)
are always seen; the prompt's end is read densely, so that no boundary falls inside the question.
"""

import math

import torch

from engine.methods.omnikv.block_sparse import BlockSparse
from engine.plan.layers import Role, tail_start
from kernels.column_scores import column_scores
from kernels.prefill import prefill_dense, prefill_dense_lse
from kernels.sparse_prefill import prefill_sparse
from kernels.topk import select_topk

# blocks scored by one launch: 4 x 64 tiles fill a GPU from 8K rows on, and the scores stay at 16
# bytes a token
AT_ONCE = 4


class PrefillSelector:
    """Selections of one session's prefill: per group, one index row per block of the chunk under
    way.
    """

    def __init__(self, method, setup):
        self.method, self.setup, self.plan = method, setup, setup.plan
        self.scale = setup.config.head_dim**-0.5
        self.block = method.prefill_block
        self.k = (
            min(method.prefill_ratio * self.block, setup.capacity)
            if method.prefill_ratio
            else setup.capacity
        )
        self.block_sparse = (
            BlockSparse(method, setup) if method.dense_layers == "block_sparse" else None
        )
        self.total = 0
        # blocks of the chunk under way; the last layer may see the chunk's last query only
        self.under_way = []
        self.scores = torch.empty(
            setup.batch, AT_ONCE, setup.capacity if method.prefill_ratio else 0, device=setup.device
        )
        self.scored = []  # its sparse blocks; of the newest chunk that had any
        self.index = {}  # group -> index [B, sparse blocks of the chunk, k] int32
        # rows of the past read by sparse layers, summed over blocks (for tests and tables)
        self.rows_read = 0

    @property
    def nbytes(self):
        """Bytes that live between chunks: the scores."""
        return self.scores.numel() * self.scores.element_size()

    def blocks(self, start, stop):
        """(first, last, local) of the blocks in a chunk; local: first row of the band that is
        always seen, None for a dense block.
        """
        first = start
        while first < stop:
            last = min(stop, (first // self.block + 1) * self.block)
            local = tail_start(first, self.method.tail)
            dense = last > self.total - self.method.prefill_dense_end or local <= self.k
            yield first, last, None if dense else local
            first = last

    def attend(self, layer, q, bank, start):
        """Prefill attention of one layer by its role. q [B, C, H, D] -> [B, C, H, D]."""
        role, group = self.plan.roles[layer], self.plan.group_of[layer]
        k, v = bank.kv(layer)
        if layer == 0:
            self._begin(start, start + q.shape[1])
        if any(local is not None for _, last, local in self.under_way if last > start):
            if role is Role.SPARSE:
                return self._sparse(group, q, k, v, start)
            if role is Role.FILTER and self.plan.groups[group].layers:
                return self._filter(group, q, k, v, start)
        if self.block_sparse and role in (Role.FULL, Role.WAIT):
            return self.block_sparse.attend(layer, q, k, v, start, self.total)
        return prefill_dense(q, k, v, start, self.scale, backend=self.setup.backend)

    def _begin(self, start, stop):
        """A new chunk; what an earlier one chose is forgotten where this one chooses."""
        self.under_way = list(self.blocks(start, stop))
        sparse = [block for block in self.under_way if block[2] is not None]
        if sparse:
            self.scored, self.index = sparse, {}

    def _filter(self, group, q, k, v, start):
        """A dense layer that leaves its scores behind; from them one selection per block."""
        out, lse = prefill_dense_lse(q, k, v, start, self.scale)
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
            )
            chosen.append(self._select([local for *_, local in blocks]))
        self.index[group] = torch.cat(chosen, 1)
        return out

    def _select(self, stops):
        """The k best rows below each block's stop: [B, blocks, k] int32."""
        batch, count, device = len(self.scores), len(stops), self.scores.device
        scores = self.scores[:, :count].reshape(batch * count, -1)
        hi = torch.tensor(stops * batch, dtype=torch.int32).to(device)
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

    def _sparse(self, group, q, k, v, start):
        """Runs of sparse blocks by one launch each, runs of dense ones likewise."""
        out, number = torch.empty_like(q), 0
        # [sparse?, first, last, blocks, where their index rows begin]
        runs = []
        for first, last, local in self.under_way:
            number += local is not None
            if last <= start:  # the last layer sees the chunk's last query only
                continue
            first = max(first, start)
            if not runs or runs[-1][0] != (local is not None):
                runs.append([local is not None, first, last, [], number - 1])
            runs[-1][2] = last
            runs[-1][3].append((first, last, local, self.k))
        for sparse, first, last, blocks, row in runs:
            part = slice(first - start, last - start)
            if not sparse:
                out[:, part] = prefill_dense(
                    q[:, part], k, v, first, self.scale, backend=self.setup.backend
                )
                continue
            index = self.index[group][:, row : row + len(blocks)]
            out[:, part] = prefill_sparse(
                q[:, part], k, v, index, blocks, first, self.scale, backend=self.setup.backend
            )
            self.rows_read += sum(count + first - local for first, _, local, count in blocks)
        return out

    def selections(self):
        """{(filter layer, block's first position): int64 [k]} of the newest chunk that chose,
        sequence 0.
        """
        return {
            (self.plan.groups[group].filter_layer, first): index[0, n].long().cpu()
            for group, index in self.index.items()
            for n, (first, *_) in enumerate(self.scored)
        }

    def work(self, work, start, stop):
        """(linear, attention) operations of positions start .. stop-1: dense layers, scoring (half
        an attention), sparse layers.
        """
        linear, attention = work.parts(start, stop)
        sparse = sum(1 for layer in self.plan.sparse_layers if layer < work.layers)
        filters = sum(1 for group in self.plan.groups if group.layers)
        if self.block_sparse:
            wide = sum(
                1 for role in self.plan.roles[: work.layers] if role in (Role.FULL, Role.WAIT)
            )
            attention -= wide * self.block_sparse.saved(work, start, stop, self.total)
        for first, last, local in self.blocks(start, stop):
            if local is None:
                continue
            count = last - first
            pairs = count * (self.k + first - local + (count + 1) / 2)
            attention += sparse * (work.per_pair * pairs - work.pairs(first, last))
            attention += (
                filters
                * work.per_pair
                * 0.5
                * math.ceil(count / self.method.prefill_stride)
                * local
            )
        return linear, attention
