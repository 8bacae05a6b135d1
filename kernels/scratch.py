"""Scratch memory of the decode kernels: made once per session, reused by every layer of every step,
its bytes known beforehand.
"""

from dataclasses import dataclass

import torch

from kernels.cpu import BLOCK, WINDOW_BLOCK, block_floats
from kernels.dispatch import choose_for
from kernels.split import MERGE_CHUNK, TAIL_ROOM, dense_splits, most_sparse_splits

SELECT_PROGRAMS = 128  # most programs per row of the top-k


@dataclass(frozen=True)
class Scratch:
    """Flat buffers that launchers slice by their own shapes. Between calls anything may be in them,
    except that `hist` is zero.

    part, lse: results of the splits, [B, Hkv, splits, rows, D] and [B, Hkv, splits, rows];
    chunk_part, chunk_lse: the same per 64 splits; out_lse [B, Q, H]; logits [B, H, capacity] of the
    last query (scored only), all float32; hist [B, 256 + 4096 + 4096] and ranks [B, 8 + 2 *
    programs]: histograms, state and counts of the top-k, int32. A CPU has only logits (of one
    sequence), blocks (float32: one block of K or of a window's logits) and rows (in the bank's
    dtype: what a sparse layer gathers).
    """

    part: torch.Tensor
    lse: torch.Tensor
    chunk_part: torch.Tensor
    chunk_lse: torch.Tensor
    out_lse: torch.Tensor
    logits: torch.Tensor
    hist: torch.Tensor
    ranks: torch.Tensor
    blocks: torch.Tensor
    rows: torch.Tensor

    def require(self, **elements):
        """Raise ValueError if a buffer has fewer elements than a call needs; kernels would write
        past its end.
        """
        for name, count in elements.items():
            if getattr(self, name).numel() < count:
                raise ValueError(
                    f"scratch.{name}: found {getattr(self, name).numel()} elements, this call needs {count}"
                )


def _sizes(
    batch,
    queries,
    heads,
    kv_heads,
    head_dim,
    capacity,
    budget,
    device,
    scored,
    window,
    backend,
    dtype,
):
    """{field: (elements, dtype)} of what `make_scratch` allocates."""
    chosen, sizes = choose_for(backend, torch.device(device)), {}
    if chosen == "cpu":
        blocks = max(
            block_floats(0, head_dim, 1, min(BLOCK, capacity)) if scored else 0,
            block_floats(heads, head_dim, window, min(WINDOW_BLOCK, capacity)) if window else 0,
        )
        rows = (min(budget + TAIL_ROOM, capacity) if budget else 0) * 2 * kv_heads * head_dim
        logits = heads * capacity if scored else 0
        sizes = {
            "blocks": (blocks, torch.float32),
            "rows": (rows, dtype),
            "logits": (logits, torch.float32),
        }
    if chosen != "triton":
        return {name: sizes.get(name, (0, torch.float32)) for name in Scratch.__dataclass_fields__}
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
    none = {"blocks": 0, "rows": 0}
    return {
        name: (count, torch.int32 if name in ints else torch.float32)
        for name, count in (floats | ints | none).items()
    }


def make_scratch(
    batch,
    queries,
    heads,
    kv_heads,
    head_dim,
    capacity,
    budget,
    device,
    scored,
    window,
    backend="auto",
    dtype=torch.float32,
):
    """Scratch for decode steps of up to these sizes.

    capacity: rows of the bank; budget: the most tokens that a sparse layer reads (0: none); scored:
    filter layers leave keys (and the top-k runs); window: queries of a windowed selector (0: none);
    backend: as in the launchers; dtype: the bank's.
    """
    sizes = _sizes(
        batch,
        queries,
        heads,
        kv_heads,
        head_dim,
        capacity,
        budget,
        device,
        scored,
        window,
        backend,
        dtype,
    )
    buffers = {
        name: torch.empty(count, dtype=dtype, device=device)
        for name, (count, dtype) in sizes.items()
    }
    buffers["hist"].zero_()
    return Scratch(**buffers)


def scratch_bytes(
    batch,
    queries,
    heads,
    kv_heads,
    head_dim,
    capacity,
    budget,
    device,
    scored,
    window,
    backend="auto",
    dtype=torch.float32,
):
    """Bytes that `make_scratch` of the same arguments allocates."""
    sizes = _sizes(
        batch,
        queries,
        heads,
        kv_heads,
        head_dim,
        capacity,
        budget,
        device,
        scored,
        window,
        backend,
        dtype,
    )
    return sum(count * dtype.itemsize for count, dtype in sizes.values())
