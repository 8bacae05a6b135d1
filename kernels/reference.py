"""Plain torch attention that every decode kernel is checked against: one row of a batch at a time,
everything in float32.

Rows are made contiguous before they are multiplied, so that the same rows give the same bits
wherever they came from (a slice of a bank, a gather, a copy from host memory). DESIGN.md's bitwise
identities stand on that.
"""

import torch


def attend(q, k, v, visible, scale, scores=False):
    """Softmax attention of Q queries over n rows, in float32.

    q [Q, H, D], k and v [Hkv, n, D] of any strides and dtype, visible [Q] ints: query j sees rows <
    visible[j]. Returns (out [Q, H, D] in q.dtype, logits [Q, H, n] float32 or None): logits are
    scaled and -inf where not visible.
    """
    queries, heads, dim = q.shape
    kv_heads, rows, _ = k.shape
    group = heads // kv_heads
    packed = (
        q.float()
        .view(queries, kv_heads, group, dim)
        .transpose(0, 1)
        .reshape(kv_heads, queries * group, dim)
    )
    logits = torch.bmm(packed, k.float().contiguous().transpose(1, 2)) * scale
    logits = logits.view(kv_heads, queries, group, rows)
    limit = torch.as_tensor(visible, device=k.device).view(1, queries, 1, 1)
    logits = logits.masked_fill(torch.arange(rows, device=k.device) >= limit, float("-inf"))
    weights = torch.softmax(logits, dim=-1).view(kv_heads, queries * group, rows)
    out = torch.bmm(weights, v.float().contiguous()).view(kv_heads, queries, group, dim)
    out = out.transpose(0, 1).reshape(queries, heads, dim).to(q.dtype)
    return out, logits.transpose(0, 1).reshape(queries, heads, rows) if scores else None


def head_max(logits, kind):
    """One number per row from its logits under every head: OmniKV Eq. 3 (max over heads), before
    the sum over queries.

    logits [W, H, n] float32 -> [W, n] float32. kind "softmax": max over heads of the softmax over
    the n rows; "raw": max over heads of the logit itself.
    """
    if kind == "softmax":
        return torch.softmax(logits, dim=-1).amax(dim=1)
    if kind == "raw":
        return logits.amax(dim=1)
    raise ValueError(f"scores: found {kind!r}, expected 'softmax' or 'raw'")
