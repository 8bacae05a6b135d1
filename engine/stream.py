"""Attention to a layer whose rows stream by: the past block by block, the newest rows from where they are, merged by log-sum-exp."""

from kernels.prefill import attend_chunk, attend_rows, merge


def attend_stream(q, bank, layer, first, scale):
    """Causal attention of q [B, C, H, D] at positions first .. first+C-1, rows already written, to an offloaded layer.

    Blocks begin at fixed positions (multiples of the stream block), so the result depends on the rows alone. Returns
    [B, C, H, D] in q.dtype. Device memory beyond q: the bank's two stream blocks and one partial result per block.
    """
    parts = [attend_rows(q, k, v, scale) for _, k, v in bank.blocks(layer, 0, first)]
    own = attend_chunk(q, *bank.own(layer, first, first + q.shape[1]), 0, scale)
    return merge([*parts, own], q.dtype)[0] if parts else own[0]
