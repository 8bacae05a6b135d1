"""Attention to a layer whose rows stream by: the past block by block, the newest rows from where
they are, merged by log-sum-exp.
"""

import torch

from kernels.prefill import attend_chunk, attend_rows, merge


def attend_stream(q, bank, layer, first, scale):
    """Causal attention of q [B, C, H, D] at positions first .. first+C-1, rows already written, to
    an offloaded layer.

    Blocks begin at fixed positions (multiples of the stream block), so the result depends on the
    rows alone. Returns [B, C, H, D] in q.dtype. Device memory beyond q: the bank's two stream
    blocks and two partial results, whatever the length (one per block, merged at the end, would be
    half a gigabyte at a million tokens of an 8B model).
    """
    so_far = None
    for _, k, v in bank.blocks(layer, 0, first):
        part = attend_rows(q, k, v, scale)
        so_far = part if so_far is None else merge([so_far, part], torch.float32)
    own = attend_chunk(q, *bank.own(layer, first, first + q.shape[1]), 0, scale)
    return own[0] if so_far is None else merge([so_far, own], q.dtype)[0]
