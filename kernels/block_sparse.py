"""Block-sparse prefill attention of dense layers: a block of queries attends, per head, to the key blocks that carry its mass.

The mass is estimated from few products: a softmax over one number per S x S tile, summed over the tiles of a block pair. "pooled" (as in
SpargeAttn, thu-ml/SpargeAttn, without its quantised part): the mean query of S rows against the mean key of S. "antidiagonal" (XAttention,
mit-han-lab/x-attention, xattn/src/Xattention.py): S queries in reverse beside S keys in order make one product of width S x D, the sum
of the tile's antidiagonal. Which keeps more with fewer blocks: docs/PREFILL.md. Each head chooses for itself: the union over a group's
heads would keep nearly everything. Blocks lie at absolute multiples of BLOCK, so how a prompt is cut into chunks of whole blocks does not
change a result.
"""

import torch

from kernels.prefill import attend_chunk, attend_rows, merge

BLOCK = 128
ESTIMATORS = ("antidiagonal", "pooled")


def block_mass(q, k, first, stride, scale, estimator="antidiagonal"):
    """Estimated share of attention mass of every (head, query block, key block).

    q [B, C, H, D] at positions first .. first+C-1, first and C multiples of BLOCK; k [B, Hkv, >= first+C, D] view; stride divides
    BLOCK. Returns float32 [B, H, C / BLOCK, (first + C) / BLOCK]; a row sums to one, key blocks after the query block are zero.
    Memory: 4 bytes x group x C x (first + C) / stride^2, one K/V head at a time.
    """
    batch, chunk, heads, dim = q.shape
    kv_heads, stop = k.shape[1], first + chunk
    group, per = heads // kv_heads, BLOCK // stride
    later = torch.arange(stop // stride, device=q.device) > torch.arange(first // stride, stop // stride, device=q.device).unsqueeze(1)
    mass = torch.empty(batch, heads, chunk // BLOCK, stop // BLOCK, device=q.device)
    for b in range(batch):
        for h in range(kv_heads):
            queries = q[b, :, h * group:(h + 1) * group].transpose(0, 1).reshape(group, chunk // stride, stride, dim)
            keys = k[b, h, :stop].reshape(stop // stride, stride, dim)
            if estimator == "pooled":
                logits = queries.mean(2) @ keys.mean(1).t()
            else:
                logits = (queries.flip(2).flatten(2) @ keys.flatten(1).t()).float() / stride
            weights = torch.softmax((logits.float() * scale).masked_fill(later, float("-inf")), -1)
            tiles = weights.view(group, chunk // BLOCK, per, stop // BLOCK, per)
            mass[b, h * group:(h + 1) * group] = tiles.sum((2, 4)) / per
    return mass


def choose_blocks(mass, first, threshold):
    """The fewest key blocks of each row with mass >= threshold, and block 0, the block before and the query's own.

    mass as `block_mass` returns it, first: position of the first query. Returns bool of the same shape.
    """
    ordered, order = mass.sort(-1, descending=True)
    wanted = ordered.cumsum(-1) - ordered < threshold
    keep = torch.zeros_like(wanted).scatter_(-1, order, wanted)
    column = torch.arange(mass.shape[-1], device=mass.device)
    own = first // BLOCK + torch.arange(mass.shape[-2], device=mass.device).unsqueeze(1)
    return (keep | (column == 0) | (column == own - 1) | (column == own)) & (column <= own)


def attend_blocks(q, k, v, keep, first, scale):
    """Causal attention over the kept key blocks: (out [B, C, H, D] in q.dtype, lse [B, C, H] float32).

    keep [B, H, C / BLOCK, (first + C) / BLOCK] bool with every query block's own key block. Plain torch: kept blocks are gathered per
    head, the own block is causal, both merged by log-sum-exp.
    """
    batch, chunk, heads, dim = q.shape
    group = heads // k.shape[1]
    out, lse = torch.empty_like(q), torch.empty(batch, chunk, heads, device=q.device)
    for b in range(batch):
        rows_k, rows_v = (t[b, :, :first + chunk].reshape(t.shape[1], -1, BLOCK, dim) for t in (k, v))
        lists = [[rows[:(first // BLOCK + n)].nonzero().squeeze(1) for n, rows in enumerate(head)] for head in keep[b]]
        for n in range(chunk // BLOCK):
            part = slice(n * BLOCK, (n + 1) * BLOCK)
            own = attend_chunk(q[b:b + 1, part], k[b:b + 1], v[b:b + 1], first + n * BLOCK, scale)
            past_out, past_lse = torch.zeros_like(own[0]), torch.full_like(own[1], float("-inf"))
            for head in range(heads):
                if not len(lists[head][n]):
                    continue
                chosen = [t[head // group].index_select(0, lists[head][n]).view(1, 1, -1, dim) for t in (rows_k, rows_v)]
                past_out[:, :, head:head + 1], past_lse[:, :, head:head + 1] = attend_rows(q[b:b + 1, part, head:head + 1], *chosen, scale)
            out[b:b + 1, part], lse[b:b + 1, part] = merge([own, (past_out, past_lse)], q.dtype)
    return out, lse


def exact_mass(q, k, first, scale):
    """The true mass, float32, as `block_mass` returns its estimate; holds the weights of one head. For reports and tests."""
    batch, chunk, heads, _ = q.shape
    group, stop = heads // k.shape[1], first + chunk
    mass = torch.empty(batch, heads, chunk // BLOCK, stop // BLOCK, device=q.device)
    later = torch.arange(stop, device=q.device) > torch.arange(first, stop, device=q.device).unsqueeze(1)
    for b in range(batch):
        for head in range(heads):
            logits = (q[b, :, head].float() @ k[b, head // group, :stop].float().t()) * scale
            weights = torch.softmax(logits.masked_fill_(later, float("-inf")), -1)
            mass[b, head] = weights.view(chunk // BLOCK, BLOCK, stop // BLOCK, BLOCK).sum((1, 3)) / BLOCK
    return mass
