"""Attention to a layer block by block, its newest rows from where they are, merged by log-sum-exp:
to an offloaded one, or to rows that become something larger as they are read.
"""

from __future__ import annotations

import torch

from engine.bank.base import Bank, Opened
from kernels.launch.softmax import PLAIN, Softmax
from kernels.prefill.dense import attend_chunk, attend_past, attend_rows
from kernels.prefill.merge import merge


def attend_stream(
    q: torch.Tensor,
    bank: Bank,
    layer: int,
    first: int,
    scale: float,
    begin: int | None = None,
    ahead: bool = True,
    softmax: Softmax = PLAIN,
    backend: str = "auto",
    size: int | None = None,
    opened: Opened | None = None,
) -> torch.Tensor:
    """Causal attention of q [B, C, H, D] at positions first .. first+C-1, whose K and V were
    written just before. Returns [B, C, H, D] in q.dtype.

    begin: where the chunk that was written begins (None: at `first`). ahead: as in Bank.blocks.
    softmax: of the layer. backend: of the launchers. size: rows of a block, a stream block's at
    most and by default. opened: makes the K and V that q meets of a block's rows. Blocks begin at
    multiples of their size, so the result depends on the rows alone. Partial results are merged as
    they come: merged at the end, one per block, they would take half a gigabyte at a million tokens
    of an 8B model.
    """
    begin = first if begin is None else begin
    so_far = None
    for _, k, v in bank.blocks(layer, 0, begin, size, ahead):
        k, v = (k, v) if opened is None else opened(k)
        so_far = attend_past(q, k, v, scale, so_far, softmax, backend)
    k, v = bank.newest_rows(layer, begin, first + q.shape[1])
    k, v = (k, v) if opened is None else opened(k)
    newest = attend_chunk(q, k, v, first - begin, scale, softmax, backend)
    if begin < first:
        own = slice(0, first - begin)
        older = attend_rows(q, k[:, :, own], v[:, :, own], scale, False, softmax, backend)
        newest = merge([older, newest], torch.float32)
    whole = newest if so_far is None else merge([so_far, newest], q.dtype)
    return softmax.sunk(*whole)[0].to(q.dtype)
