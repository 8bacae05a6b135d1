"""Chunked OmniKV-prefill: in the sparse layers a block of queries reads r x block rows of the past, chosen by the filter layers.

Source: the OmniKV paper, section D.10 (METHODS.md items 27-28); the uniform rule over the block's queries. What the paper leaves open
is decided here: FULL, FILTER and WAIT layers stay dense; blocks begin at absolute multiples of `prefill_block`; the rows just before
a block (the tail of DESIGN.md) are always seen; the prompt's end is read densely, so that no boundary falls inside the question.
"""

import math

import torch

from engine.plan import Role, tail_start
from kernels.column_scores import column_scores
from kernels.prefill import prefill_dense, prefill_dense_lse
from kernels.sparse_prefill import prefill_sparse
from kernels.topk import select_topk


class PrefillSelector:
    """Selections of one session's prefill: per group, one index row per block of the chunk under way."""

    def __init__(self, method, setup):
        self.method, self.setup, self.plan = method, setup, setup.plan
        self.scale = setup.config.head_dim ** -0.5
        self.block = method.prefill_block
        self.k = min(method.prefill_ratio * self.block, setup.capacity)
        self.total = 0
        self.under_way = []             # blocks of the chunk under way; the last layer may see the chunk's last query only
        self.keys = torch.empty(setup.batch, setup.capacity, device=setup.device)
        self.chosen = {}                # (group, block's start) -> (index [B, k] int32, count)
        self.rows_read = 0              # rows of the past read by sparse layers, summed over blocks (for tests and tables)

    @property
    def nbytes(self):
        """Bytes that live between chunks: the scores."""
        return self.keys.numel() * self.keys.element_size()

    def blocks(self, start, stop):
        """(first, last, local) of the blocks in a chunk; local: first row of the band that is always seen, None for a dense block."""
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
            self.under_way = list(self.blocks(start, start + q.shape[1]))
        blocks = [(max(first, start), last, local, first) for first, last, local in self.under_way if last > start]
        if any(local is not None for _, _, local, _ in blocks):
            if role is Role.SPARSE:
                return self._sparse(group, q, k, v, start, blocks)
            if role is Role.FILTER and self.plan.groups[group].layers:
                return self._filter(group, q, k, v, start, blocks)
        return prefill_dense(q, k, v, start, self.scale, path=self.setup.path)

    def _filter(self, group, q, k, v, start, blocks):
        out, lse = prefill_dense_lse(q, k, v, start, self.scale)
        self.chosen = {key: value for key, value in self.chosen.items() if key[0] != group}
        for first, last, local, _ in blocks:
            if local is not None:
                part = slice(first - start, last - start, self.method.prefill_stride)
                self.chosen[group, first] = self._select(q[:, part], k, lse[:, part], local)
        return out

    def _select(self, q, k, lse, local):
        column_scores(q, k, lse, local, self.scale, self.keys, path=self.setup.path)
        batch = q.shape[0]
        sizes = torch.tensor([[0, local, self.k]] * batch, dtype=torch.int32, device=q.device).unbind(1)
        index = torch.empty(batch, self.k, dtype=torch.int32, device=q.device)
        select_topk(self.keys, *(size.contiguous() for size in sizes), index, torch.empty(batch, dtype=torch.int32, device=q.device),
                    path=self.setup.path)
        return index, min(self.k, local)

    def _sparse(self, group, q, k, v, start, blocks):
        out = torch.empty_like(q)
        for first, last, local, origin in blocks:
            part = slice(first - start, last - start)
            if local is None:
                out[:, part] = prefill_dense(q[:, part], k, v, first, self.scale, path=self.setup.path)
                continue
            index, count = self.chosen[group, origin]
            out[:, part] = prefill_sparse(q[:, part], k, v, index, count, local, first, self.scale, path=self.setup.path)
            self.rows_read += count + first - local
        return out

    def work(self, work, start, stop):
        """(linear, attention) operations of positions start .. stop-1: dense layers, scoring (half an attention), sparse layers."""
        linear, attention = work.parts(start, stop)
        sparse = sum(1 for layer in self.plan.sparse_layers if layer < work.layers)
        filters = sum(1 for group in self.plan.groups if group.layers)
        for first, last, local in self.blocks(start, stop):
            if local is None:
                continue
            count = last - first
            pairs = count * (self.k + first - local + (count + 1) / 2)
            attention += sparse * (work.per_pair * pairs - work.pairs(first, last))
            attention += filters * work.per_pair * 0.5 * math.ceil(count / self.method.prefill_stride) * local
        return linear, attention
