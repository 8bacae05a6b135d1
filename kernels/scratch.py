"""Scratch memory of the decode kernels: made once per session, reused by every layer of every step, its bytes known
beforehand."""

from dataclasses import dataclass

import torch

from kernels.dispatch import choose
from kernels.split import MERGE_CHUNK, dense_splits, most_sparse_splits

SELECT_PROGRAMS = 128              # most programs per row of the top-k


@dataclass(frozen=True)
class Scratch:
    """Flat buffers that launchers slice by their own shapes. Between calls anything may be in them, except that `hist`
    is zero.

    part, lse: results of the splits, [B, Hkv, splits, rows, D] and [B, Hkv, splits, rows]; chunk_part, chunk_lse: the
    same per 64 splits; out_lse [B, Q, H]; logits [B, H, capacity] of the last query (scored only), all float32; hist
    [B, 256 + 4096 + 4096] and ranks [B, 8 + 2 * programs]: histograms, state and counts of the top-k, int32.
    """

    part: torch.Tensor
    lse: torch.Tensor
    chunk_part: torch.Tensor
    chunk_lse: torch.Tensor
    out_lse: torch.Tensor
    logits: torch.Tensor
    hist: torch.Tensor
    ranks: torch.Tensor

    def require(self, **elements):
        """Raise ValueError if a buffer has fewer elements than a call needs; kernels would write past its end."""
        for name, count in elements.items():
            if getattr(self, name).numel() < count:
                raise ValueError(f"scratch.{name}: found {getattr(self, name).numel()} elements, this call needs {count}")


def _sizes(batch, queries, heads, kv_heads, head_dim, capacity, budget, device, scored, window, path):
    """{field: (elements, dtype)} of what `make_scratch` allocates."""
    if choose(path, torch.empty(0, device=device)) != "triton":
        return {name: (0, torch.float32) for name in Scratch.__dataclass_fields__}
    group = heads // kv_heads
    dense = dense_splits(capacity)
    splits = max(dense, most_sparse_splits(budget, kv_heads) if budget else 0)
    chunks = -(-splits // MERGE_CHUNK)
    rows = batch * kv_heads * queries * group
    floats = {
        "part": rows * splits * head_dim,
        "lse": max(rows * splits, batch * heads * window * dense),
        "chunk_part": rows * chunks * head_dim if chunks > 1 else 0,
        "chunk_lse": rows * chunks if chunks > 1 else 0,
        "out_lse": batch * max(queries, window) * heads,
        "logits": batch * heads * capacity if scored else 0,
    }
    ints = {
        "hist": batch * (256 + 4096 + 4096) if scored or window else 0,
        "ranks": batch * (8 + 2 * SELECT_PROGRAMS) if scored or window else 0,
    }
    return {name: (count, torch.int32 if name in ints else torch.float32) for name, count in (floats | ints).items()}


def make_scratch(batch, queries, heads, kv_heads, head_dim, capacity, budget, device, scored, window, path="auto"):
    """Scratch for decode steps of up to these sizes.

    capacity: rows of the bank; budget: the most tokens that a sparse layer reads (0: none); scored: filter layers leave
    keys (and the top-k runs); window: queries of a windowed selector (0: none); path: as in the launchers.
    """
    sizes = _sizes(batch, queries, heads, kv_heads, head_dim, capacity, budget, device, scored, window, path)
    buffers = {name: torch.empty(count, dtype=dtype, device=device) for name, (count, dtype) in sizes.items()}
    buffers["hist"].zero_()
    return Scratch(**buffers)


def scratch_bytes(batch, queries, heads, kv_heads, head_dim, capacity, budget, device, scored, window, path="auto"):
    """Bytes that `make_scratch` of the same arguments allocates."""
    sizes = _sizes(batch, queries, heads, kv_heads, head_dim, capacity, budget, device, scored, window, path)
    return sum(count * dtype.itemsize for count, dtype in sizes.values())
