"""Gathered prefill attention: a block of queries attends to chosen rows of the past, to a local band and, causally, to itself."""

import torch

from kernels.dispatch import choose
from kernels.prefill import attend_chunk, attend_rows, merge
from kernels.reference import attend


def prefill_sparse_ref(q, k, v, index, count, local, start, scale):
    """Reference of `prefill_sparse`, same arguments."""
    batch, chunk, _, _ = q.shape
    out = torch.empty_like(q)
    stop = start + chunk
    for b in range(batch):
        chosen = index[b, :count].long()
        rows = [torch.cat([t[b].index_select(1, chosen), t[b, :, local:stop]], dim=1) for t in (k, v)]
        visible = torch.arange(1, chunk + 1, device=q.device) + count + start - local
        out[b], _ = attend(q[b], *rows, visible, scale)
    return out


def prefill_sparse(q, k, v, index, count, local, start, scale, path="auto"):
    """Attention of queries start .. start+C-1 to the rows `index`, all visible, and to rows local .. their own position.

    q [B, C, H, D]; k, v [B, Hkv, T, D] views of any strides, last dim contiguous; index [B, K] int32, the first `count` entries
    distinct and < local; count, local <= start: ints (prefill is driven by the host). Returns [B, C, H, D] in q.dtype.
    """
    if choose(path, q) == "reference":
        return prefill_sparse_ref(q, k, v, index, count, local, start, scale)
    return prefill_sparse_blocks(q, k, v, index, count, local, start, scale)


def prefill_sparse_blocks(q, k, v, index, count, local, start, scale):
    """`prefill_sparse` in plain torch: chosen rows gathered once per block of queries, three parts merged by log-sum-exp."""
    outs = []
    for b in range(q.shape[0]):
        one, k_b, v_b = q[b:b + 1], k[b:b + 1], v[b:b + 1]
        parts = [attend_chunk(one, k_b, v_b, start, scale)]
        if local < start:
            parts.append(attend_rows(one, k_b[:, :, local:start], v_b[:, :, local:start], scale))
        if count:
            parts.append(attend_rows(one, *gather(k_b, v_b, index[b, :count]), scale))
        outs.append(merge(parts, q.dtype)[0] if len(parts) > 1 else parts[0][0])
    return torch.cat(outs) if len(outs) > 1 else outs[0]


def gather(k, v, chosen):
    """Rows `chosen` of k and v [1, Hkv, T, D] as two [1, Hkv, n, D] views; whole contiguous rows are copied where K and V lie
    side by side (a token-major bank), else head by head."""
    _, heads, rows, dim = k.shape
    wide = 2 * heads * dim
    if k.stride() == v.stride() == (k.stride(0), dim, wide, 1) and v.data_ptr() - k.data_ptr() == heads * dim * k.element_size():
        packed = k.as_strided((rows, wide), (wide, 1)).index_select(0, chosen).view(-1, 2, heads, dim).permute(1, 2, 0, 3)
        return packed[0:1], packed[1:2]
    return tuple(torch.stack([t[0, h].index_select(0, chosen) for h in range(heads)])[None] for t in (k, v))
