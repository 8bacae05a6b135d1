"""Gather-sparse flash-decoding: queries attend to chosen rows of the bank and to the tail, in one pass, read by index in place."""

import torch

from kernels.dispatch import choose
from kernels.reference import attend


def decode_sparse_ref(q, k, v, index, counts, tail_start, lengths, scale):
    """Reference of `decode_sparse`, same arguments; gathers rows in ascending order, then the tail, then attends."""
    batch, queries, heads, _ = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out = torch.empty_like(q)
    for b in range(batch):
        n, start, kept = int(lengths[b]), int(tail_start[b]), int(counts[b])
        visible = [kept + n - start - (queries - 1 - j) for j in range(queries)]
        if index.shape[1] == 1:
            chosen = index[b, 0, :kept].long()
            rows = [torch.cat([t[b].index_select(1, chosen), t[b, :, start:n]], dim=1) for t in (k, v)]
            out[b], _ = attend(q[b], *rows, visible, scale)
            continue
        for h in range(kv_heads):
            chosen = index[b, h, :kept].long()
            rows = [torch.cat([t[b, h].index_select(0, chosen), t[b, h, start:n]])[None] for t in (k, v)]
            heads_of = slice(h * group, (h + 1) * group)
            out[b, :, heads_of], _ = attend(q[b, :, heads_of], *rows, visible, scale)
    return out


def decode_sparse(q, k, v, index, counts, tail_start, lengths, scale, scratch=None, path="auto"):
    """Attention of Q <= 8 new queries over the rows `index` and the rows tail_start .. lengths-1.

    q [B, Q, H, D]; k, v [B, Hkv, T, D] views of any strides, last dim contiguous; index [B, 1 or Hkv, K] int32, the first
    counts[b] entries ascending, distinct and < tail_start[b], the rest ignored; counts, tail_start, lengths [B] int32;
    lengths counts the rows visible to the LAST query (query j sees Q-1-j fewer of the tail). Rows are visited in ascending order.
    Returns out [B, Q, H, D] in q.dtype.
    """
    chosen = choose(path, q)
    if chosen == "triton":
        return decode_sparse_triton(q, k, v, index, counts, tail_start, lengths, scale, scratch)
    if chosen == "cpu":
        return decode_sparse_cpu(q, k, v, index, counts, tail_start, lengths, scale, scratch)
    return decode_sparse_ref(q, k, v, index, counts, tail_start, lengths, scale)


def decode_sparse_cpu(q, k, v, index, counts, tail_start, lengths, scale, scratch=None):
    """`decode_sparse` on CPU tensors, same arguments."""
    return decode_sparse_ref(q, k, v, index, counts, tail_start, lengths, scale)


def decode_sparse_triton(q, k, v, index, counts, tail_start, lengths, scale, scratch=None):
    """`decode_sparse` by the Triton kernels of this file, same arguments."""
    return decode_sparse_ref(q, k, v, index, counts, tail_start, lengths, scale)
