"""What the CPU paths of the decode kernels share: attention over one sequence's rows, and its
logits block by block.

Plain torch operators only. The attention is torch's fused CPU kernel with the queries of a group
folded into one run of queries, so that no K/V head is repeated; it keeps scores in float32 and
returns their log-sum-exp, and nothing that it allocates grows with the rows. It reads bfloat16 rows
at 5 to 7 GB/s with one thread on a CPU with AMX and float32 rows at 7 to 10; products of one head
at a time read 7 to 9, but round bfloat16 scores to 8 bits (docs/LOG.md, 2026-11-20).
"""

import math

import torch

# rows of one block of logits: K in float32 (0.5 to 1 MB) stays in a core's 2 MB of L2
BLOCK = 2048
# the same under a window of queries: 16 queries of 32 heads then hold 2 MB of logits
WINDOW_BLOCK = 1024
VALUE_BLOCK = 8192  # rows of one product with V, whose result a bfloat16 product rounds
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def attend_sequence(q, k, v, scale):
    """Attention of Q <= 8 new queries to n rows; the last query sees all of them, query j sees n -
    (Q-1-j).

    q [Q, H, D]; k, v [Hkv, n, D] of any strides, last dim contiguous. Returns (out [Q, H, D] in
    q.dtype, lse [Q, H] float32); a query that sees nothing gives zeros and -inf. The rows that all
    queries see need no mask; the last Q-1 are a small product of their own, merged by log-sum-exp.
    """
    queries, heads, dim = q.shape
    kv_heads, rows, _ = k.shape
    group = heads // kv_heads
    shared = max(0, rows - (queries - 1))
    packed = (
        q.view(queries, kv_heads, group, dim)
        .transpose(0, 1)
        .reshape(kv_heads, queries * group, dim)
    )
    out, lse = None, torch.full((), -math.inf)
    if shared:
        out, lse = _flash(
            packed[None], k[None, :, :shared], v[None, :, :shared], 0.0, False, scale=scale
        )
        out, lse = out[0], lse[0].float()
    if shared < rows or not shared:
        out, lse = _attend_newest(packed, k[:, shared:], v[:, shared:], queries, scale, out, lse)
    out = out.reshape(kv_heads, queries, group, dim).transpose(0, 1).reshape(queries, heads, dim)
    return out, lse.view(kv_heads, queries, group).transpose(0, 1).reshape(queries, heads)


def _attend_newest(packed, k, v, queries, scale, out, lse):
    """Adds the rows that not every query sees: k, v [Hkv, m < Q, D], of which query j sees m -
    (Q-1-j).
    """
    kv_heads, rows, dim = k.shape
    logits = (
        torch.matmul(packed.float(), k.float().transpose(1, 2)).view(
            kv_heads, queries, packed.shape[1] // queries, rows
        )
        * scale
    )
    limit = rows - (queries - 1) + torch.arange(queries)
    logits.masked_fill_(torch.arange(rows) >= limit.view(-1, 1, 1), -math.inf)
    logits = logits.flatten(1, 2)
    total = torch.logaddexp(lse, torch.logsumexp(logits, -1))
    base = total.masked_fill(total == -math.inf, 0.0).unsqueeze(-1)
    added = torch.matmul(torch.exp(logits - base), v.float())
    if out is not None:
        added += out.float() * torch.exp(lse.unsqueeze(-1) - base)
    return added.to(packed.dtype), total


def block_floats(heads, head_dim, queries, block=BLOCK):
    """Elements of the float32 buffer of `logit_blocks` for `queries` queries of `heads` heads."""
    return block * (head_dim + queries * heads)


def logit_blocks(q, k, scale, buffer=None, block=BLOCK, held=None):
    """The logits of q [Q, H, D] on k [Hkv, n, D] in float32, in blocks of rows: (start, stop, [Hkv,
    Q, G, stop - start]).

    A block of K is converted to float32 once, in cache: a bfloat16 product would round its scores
    to 8 bits and fill the selector's scores with ties. buffer: float32 of at least `block_floats`,
    or None (allocates); the yielded tensor lies in it, contiguous, until the next block. held [Hkv,
    Q
    * G, n] float32, where given, takes the logits instead.
    """
    queries, heads, dim = q.shape
    kv_heads, rows, _ = k.shape
    group = heads // kv_heads
    size = min(block, rows)
    needed = block_floats(heads if held is None else 0, dim, queries, size)
    if buffer is None or buffer.numel() < needed:
        buffer = torch.empty(needed)
    packed = (
        (q.float() * scale)
        .view(queries, kv_heads, group, dim)
        .transpose(0, 1)
        .reshape(kv_heads, -1, dim)
    )
    for start in range(0, rows, block):
        stop = min(rows, start + block)
        wide = buffer[: (stop - start) * dim].view(stop - start, dim)
        if held is None:
            logits = buffer[size * dim :][: heads * queries * (stop - start)].view(
                kv_heads, -1, stop - start
            )
        else:
            logits = held[:, :, start:stop]
        for h in range(kv_heads):
            own = k[h, start:stop]
            if k.dtype != torch.float32:
                own = wide.copy_(own)
            torch.mm(packed[h], own.t(), out=logits[h])
        yield start, stop, logits.view(kv_heads, queries, group, stop - start)


def attend_scored(q, k, v, scale, scores, kind, buffer=None, held=None):
    """Attention of one new query to n rows that leaves the selector's scores: out [1, H, D].

    q [1, H, D]; k, v [Hkv, n, D], n >= 1; scores [n] float32 takes the head maxima (`kind`
    "softmax" or "raw"); buffer as in `logit_blocks`; held: float32 of at least H * n, or None
    (allocates): the logits of every row, then its weights. One pass over K. The fused kernel's
    log-sum-exp is no substitute: its exponential is good to 5e-5 in bfloat16, and scores of
    different heads must compare to 1e-5.
    """
    kv_heads, rows, dim = k.shape
    heads = q.shape[1]
    if held is None or held.numel() < heads * rows:
        held = torch.empty(heads * rows)
    weights = held[: heads * rows].view(heads, rows)
    grouped = weights.view(kv_heads, -1, rows)
    for _ in logit_blocks(q, k, scale, buffer, held=grouped):
        pass
    if kind == "raw":
        torch.amax(weights, 0, out=scores)
    weights.sub_(weights.amax(1, keepdim=True)).exp_()
    weights.div_(weights.sum(1, keepdim=True))
    if kind == "softmax":
        torch.amax(weights, 0, out=scores)
    out = torch.zeros(kv_heads, heads // kv_heads, dim)
    for start in range(0, rows, VALUE_BLOCK):
        part = slice(start, start + VALUE_BLOCK)
        own = grouped[:, :, part].to(v.dtype)
        for h in range(kv_heads):
            out[h] += torch.mm(own[h], v[h, part])
    return out.view(1, heads, dim).to(q.dtype)
