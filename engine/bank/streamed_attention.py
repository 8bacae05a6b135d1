"""Attention to an offloaded layer: its past block by block, its newest rows from where they are,
merged by log-sum-exp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernels.prefill import attend_chunk, attend_rows, merge

if TYPE_CHECKING:
    from engine.bank.base import Bank


def attend_stream(
    q: torch.Tensor, bank: Bank, layer: int, first: int, scale: float
) -> torch.Tensor:
    """Causal attention of q [B, C, H, D] at positions first .. first+C-1, whose K and V were
    written just before. Returns [B, C, H, D] in q.dtype.

    Blocks begin at multiples of the stream block, so the result depends on the rows alone. Partial
    results are merged as they come: merged at the end, one per block, they would take half a
    gigabyte at a million tokens of an 8B model.
    """
    so_far = None
    for _, k, v in bank.blocks(layer, 0, first):
        part = attend_rows(q, k, v, scale)
        so_far = part if so_far is None else merge([so_far, part], torch.float32)
    newest = attend_chunk(q, *bank.newest_rows(layer, first, first + q.shape[1]), 0, scale)
    return newest[0] if so_far is None else merge([so_far, newest], q.dtype)[0]
