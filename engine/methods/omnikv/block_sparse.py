"""Block-sparse prefill of the FULL and WAIT layers (`dense_layers="block_sparse"`): beyond the
paper, off by default.

Per head and block of 128 queries only the key blocks that carry `dense_mass` of the estimated
attention are read, and always the first one and the local band (kernels/prefill/block_sparse.py).
FILTER layers stay dense: everything after them depends on their scores. Short pasts, blocks cut by
a chunk's edge and the prompt's end are read densely.
"""

from __future__ import annotations

from typing import Any

import torch

from engine.methods.base import Setup
from engine.methods.omnikv.settings import Settings
from engine.plan.prefill_time import PrefillFlops
from kernels.prefill.block_sparse import BLOCK, attend_blocks, block_mass, choose_blocks, exact_mass
from kernels.prefill.dense import prefill_dense

FROM = 16384  # past tokens below which estimating does not pay
# share of the causal blocks that the count of operations assumes: the real share depends on the
# text
EXPECTED_DENSITY = 0.5


class BlockSparse:
    """One session's block-sparse layers: only counters outlive a chunk."""

    def __init__(self, method: Settings, setup: Setup):
        self.method, self.setup = method, setup
        self.scale = setup.config.scale
        self.blocks_kept = self.blocks_causal = 0
        # a list takes {"layer", "first", "recall" [B, H, blocks], "density" [B, H, blocks]} per
        # call
        self.meter: list[dict[str, Any]] | None = None

    def span(self, start: int, stop: int, total: float) -> tuple[int, int]:
        """(first, last) positions of the whole blocks of a chunk that are read sparsely; equal
        where there are none. total: the prompt's length.
        """
        first = max(-(-start // BLOCK), -(-FROM // BLOCK)) * BLOCK
        last = int(min(stop, total - self.method.prefill_dense_end) // BLOCK * BLOCK)
        return (first, last) if first < last else (start, start)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        start: int,
        total: float,
    ) -> torch.Tensor:
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
        mass = block_mass(q[:, part], k, first, self.method.dense_stride, self.scale)
        keep = choose_blocks(mass, first, self.method.dense_mass)
        out[:, part] = attend_blocks(
            q[:, part], k, v, keep, first, self.scale, backend=self.setup.backend
        )[0]
        self._count(layer, q[:, part], k, keep, first)
        return out

    def _count(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, keep: torch.Tensor, first: int
    ) -> None:
        causal = first // BLOCK + 1 + torch.arange(keep.shape[2], device=keep.device)
        self.blocks_kept += int(keep.sum())
        self.blocks_causal += int(causal.sum()) * keep.shape[0] * keep.shape[1]
        if self.meter is not None:
            recall = (exact_mass(q, k, first, self.scale) * keep).sum(-1)
            self.meter.append(
                {"layer": layer, "first": first, "recall": recall, "density": keep.sum(-1) / causal}
            )

    def saved(self, flops: PrefillFlops, start: int, stop: int, total: float) -> float:
        """Count the attention operations of one layer that are expected to be saved, less those of
        the estimate: with stride S, half of one in S x S products of the attention's width.
        """
        first, last = self.span(start, stop, total)
        if first == last:
            return 0.0
        estimate = 0.5 / self.method.dense_stride**2
        return flops.pairs(first, last) * (1 - EXPECTED_DENSITY - estimate)
