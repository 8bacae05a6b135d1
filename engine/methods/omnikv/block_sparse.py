"""Block-sparse prefill of the FULL and WAIT layers (`dense_layers="block_sparse"`): beyond the
paper, off by default.

Per head and block of 128 queries only the key blocks that carry `dense_mass` of the estimated
attention are read, the first one and the local band always (kernels/block_sparse.py). FILTER layers
stay dense: everything after them hangs on their scores. Short pasts, blocks cut by a chunk's edge
and the prompt's end are read densely.
"""

import torch

from kernels.block_sparse import BLOCK, attend_blocks, block_mass, choose_blocks, exact_mass
from kernels.prefill import prefill_dense

FROM = 16384  # rows of the past below which estimating does not pay
# share of the causal blocks that the count of operations assumes; how many it will be, only the
# text says
EXPECTED_DENSITY = 0.5


class BlockSparse:
    """One session's block-sparse layers: nothing lives between chunks but counters."""

    def __init__(self, method, setup):
        self.method, self.setup = method, setup
        self.scale = setup.config.head_dim**-0.5
        self.blocks_kept = self.blocks_causal = 0
        # a list: every call adds {"layer", "first", "recall" [B, H, blocks], "density" [B, H,
        # blocks]}
        self.meter = None

    def span(self, start, stop, total):
        """(first, last) of the whole blocks of a chunk that are read sparsely; first == last where
        there are none.
        """
        first = max(-(-start // BLOCK), -(-FROM // BLOCK)) * BLOCK
        last = min(stop, total - self.method.prefill_dense_end) // BLOCK * BLOCK
        return (first, last) if first < last else (start, start)

    def attend(self, layer, q, k, v, start, total):
        """Attention of a chunk at positions start .. start+C-1. q [B, C, H, D]; k, v [B, Hkv, T, D]
        -> [B, C, H, D].
        """
        stop = start + q.shape[1]
        first, last = self.span(start, stop, total)
        if first == last:
            return prefill_dense(q, k, v, start, self.scale, backend=self.setup.backend)
        out = torch.empty_like(q)
        for low, high in ((start, first), (last, stop)):
            if low < high:
                part = slice(low - start, high - start)
                out[:, part] = prefill_dense(
                    q[:, part], k, v, low, self.scale, backend=self.setup.backend
                )
        part = slice(first - start, last - start)
        mass = block_mass(
            q[:, part], k, first, self.method.dense_stride, self.scale, self.method.dense_estimator
        )
        keep = choose_blocks(mass, first, self.method.dense_mass)
        out[:, part] = attend_blocks(
            q[:, part], k, v, keep, first, self.scale, backend=self.setup.backend
        )[0]
        self._count(layer, q[:, part], k, keep, first)
        return out

    def _count(self, layer, q, k, keep, first):
        causal = first // BLOCK + 1 + torch.arange(keep.shape[2], device=keep.device)
        self.blocks_kept += int(keep.sum())
        self.blocks_causal += int(causal.sum()) * keep.shape[0] * keep.shape[1]
        if self.meter is not None:
            recall = (exact_mass(q, k, first, self.scale) * keep).sum(-1)
            self.meter.append(
                {"layer": layer, "first": first, "recall": recall, "density": keep.sum(-1) / causal}
            )

    def saved(self, work, start, stop, total):
        """Attention operations of one layer that are expected to be left out, the estimate's own
        taken off: with stride S half of one in S products of the attention's width
        ("antidiagonal"), or in S x S ("pooled").
        """
        first, last = self.span(start, stop, total)
        if first == last:
            return 0.0
        own = 0.5 / self.method.dense_stride ** (
            2 if self.method.dense_estimator == "pooled" else 1
        )
        return work.pairs(first, last) * (1 - EXPECTED_DENSITY - own)
