"""Causal attention of a chunk of queries against all rows before it and itself: what dense layers run in prefill."""

import torch

from kernels.reference import attend


def prefill_dense_ref(q, k, v, start, scale):
    """Reference of `prefill_dense`, same arguments; loops over the batch and holds every score."""
    out = torch.empty_like(q)
    stop = start + q.shape[1]
    visible = torch.arange(start + 1, stop + 1, device=q.device)
    for b in range(q.shape[0]):
        out[b], _ = attend(q[b], k[b, :, :stop], v[b, :, :stop], visible, scale)
    return out


def prefill_dense(q, k, v, start, scale, path="auto"):
    """Attention of a chunk at positions start .. start+C-1 to rows 0 .. its own position, rows already written.

    q [B, C, H, D]; k, v [B, Hkv, T, D] views of any strides, last dim contiguous; start: int, the same for all sequences.
    Returns [B, C, H, D] in q.dtype.
    """
    return prefill_dense_ref(q, k, v, start, scale)
