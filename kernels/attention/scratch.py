"""Scratch memory of the decode kernels: made once per session, reused by every layer of every step,
and counted in bytes before it exists.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.attention.cpu import WINDOW_BLOCK, block_floats, chunk_rows, widened_floats
from kernels.attention.native import part_floats, reads
from kernels.attention.split import (
    MERGE_CHUNK,
    TAIL_ROOM,
    dealt_heads,
    dense_splits,
    most_sparse_splits,
    tickets,
)
from kernels.launch.dispatch import NATIVE, choose_for
from kernels.launch.radix import BINS
from kernels.launch.shapes import processors
from kernels.native.library import missing
from kernels.rows.forms import row_widths

SELECT_PROGRAMS = 128  # most programs per row of the top-k


@dataclass(frozen=True)
class ScratchShape:
    """The largest decode step that a Scratch serves.

    capacity: rows of the bank; budget: the most tokens that a sparse layer reads (0: no sparse
    layer); scored: filter layers leave scores, and the top-k runs; window: queries of a windowed
    selector (0: none); dtype: the bank's; capped: logits have a cap. local: (K/V heads, head_dim,
    tokens seen) of sliding-window layers whose heads are others.
    """

    batch: int
    queries: int
    heads: int
    kv_heads: int
    head_dim: int
    capacity: int
    budget: int = 0
    scored: bool = False
    window: int = 0
    dtype: torch.dtype = torch.float32
    capped: bool = False
    local: tuple[int, int, int] | None = None

    @property
    def rows(self) -> int:
        """Query rows of one K/V head."""
        return self.queries * (self.heads // self.kv_heads)


@dataclass(frozen=True)
class Scratch:
    """Flat buffers that launchers slice by their own shapes.

    Between calls they may hold anything, except that `hist` and `tickets` are zero. The Triton
    backend uses, all float32: part [B, Hkv, splits, rows, D] and lse [B, Hkv, splits, rows], the
    results of the splits; chunk_part and chunk_lse, the same per chunk of splits; out_lse
    [B, Q, H]; logits [B, H, capacity] of the last query, if layers are scored. And int32: for the
    top-k hist [B, 256 + 4096 + 4096] and ranks [B, 8 + 2 * programs]; for the merge tickets (none:
    merges are launches of their own). The CPU backend uses, of one sequence, part (of its C++
    kernel), logits, blocks (float32: a chunk of K or V, or a block of a window's K and logits) and
    rows (in the bank's dtype: the K and V that a sparse layer gathers).
    """

    part: torch.Tensor
    lse: torch.Tensor
    chunk_part: torch.Tensor
    chunk_lse: torch.Tensor
    out_lse: torch.Tensor
    logits: torch.Tensor
    hist: torch.Tensor
    ranks: torch.Tensor
    tickets: torch.Tensor
    blocks: torch.Tensor
    rows: torch.Tensor

    @property
    def merges_last(self) -> bool:
        """Whether the attention kernels merge their own splits."""
        return self.tickets.numel() > 0

    def partial(self, out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what an attention kernel writes and merges, in the order of its arguments."""
        parts = self.part, self.lse, self.chunk_part, self.chunk_lse
        return *parts, out, self.out_lse, self.tickets

    def merging_apart(self) -> Scratch:
        """The same buffers for attention kernels that leave merging to launches of their own."""
        return replace(self, tickets=self.tickets[:0])

    def clear(self) -> None:
        """Zero what must be zero between calls, after a call that broke off."""
        self.hist.zero_()
        self.tickets.zero_()

    def require(self, **elements: int) -> None:
        """Raise ValueError if a buffer is too small for a call: kernels would write past it."""
        for name, count in elements.items():
            found = getattr(self, name).numel()
            if found < count:
                raise ValueError(f"scratch.{name}: found {found} elements, this call needs {count}")


def make_scratch(shape: ScratchShape, device: torch.device | str, backend: str = "auto") -> Scratch:
    """Allocate scratch for decode steps of up to this shape; backend: as in the launchers."""
    choose_for(backend, torch.device(device))  # raises where it cannot run
    sizes = _sizes(shape, torch.device(device), backend)
    buffers = {
        name: torch.empty(count, dtype=kind, device=device) for name, (count, kind) in sizes.items()
    }
    scratch = Scratch(**buffers)
    scratch.clear()
    return scratch


def scratch_bytes(shape: ScratchShape, device: torch.device | str, backend: str = "auto") -> int:
    """Count the bytes that `make_scratch` of the same arguments allocates; on a GPU as if triton
    were installed, since a plan may be another machine's.
    """
    device = torch.device(device)
    backend = "triton" if backend == "auto" and device.type == "cuda" else backend
    sizes = _sizes(shape, device, backend)
    return sum(map(_bytes, sizes.values()))


def _bytes(size: tuple[int, torch.dtype]) -> int:
    return size[0] * size[1].itemsize


def _sizes(
    s: ScratchShape, device: torch.device, backend: str
) -> dict[str, tuple[int, torch.dtype]]:
    """Size every field of the Scratch of a backend: {name: (elements, dtype)}."""
    if s.local is not None:
        heads, width, seen = s.local
        local = replace(s, kv_heads=heads, head_dim=width, budget=seen, scored=False, window=0)
        both = (_sizes(replace(one, local=None), device, backend) for one in (s, local))
        first, second = both
        # one may have no use for a buffer that the other has, in another dtype
        return {name: max(first[name], second[name], key=_bytes) for name in first}
    chosen = backend if backend == "triton" else choose_for(backend, device)
    sizes = {name: (0, torch.float32) for name in Scratch.__dataclass_fields__}
    if chosen == "cpu":
        native = backend in NATIVE and reads(s.dtype, s.head_dim) and not missing()
        return sizes | _cpu_sizes(s, native)
    if chosen != "triton":
        return sizes
    s = replace(s, kv_heads=dealt_heads(s.heads, s.kv_heads, s.head_dim))
    dense, sms = dense_splits(s.capacity), processors(device)
    splits = max(dense, most_sparse_splits(s.budget, s.kv_heads, sms) if s.budget else 0)
    chunks = -(-splits // MERGE_CHUNK)
    rows = s.batch * s.kv_heads * s.rows
    ranked = s.scored or s.window
    floats = {
        "part": rows * splits * s.head_dim,
        "lse": max(rows * splits, s.batch * s.heads * s.window * dense),
        "chunk_part": rows * chunks * s.head_dim if chunks > 1 else 0,
        "chunk_lse": rows * chunks if chunks > 1 else 0,
        "out_lse": s.batch * max(s.queries, s.window) * s.heads,
        "logits": s.batch * s.heads * s.capacity if s.scored else 0,
    }
    ints = {
        "hist": s.batch * BINS if ranked else 0,
        # a query tile holds one query or more
        "tickets": tickets(s.batch, s.kv_heads * s.queries, splits, MERGE_CHUNK),
        "ranks": s.batch * (8 + 2 * SELECT_PROGRAMS) if ranked else 0,
    }
    sizes |= {name: (count, torch.float32) for name, count in floats.items()}
    return sizes | {name: (count, torch.int32) for name, count in ints.items()}


def _cpu_sizes(s: ScratchShape, native: bool) -> dict[str, tuple[int, torch.dtype]]:
    """The part of `_sizes` that a CPU's kernels use: C++ ones if `native`, else torch's."""
    block = min(WINDOW_BLOCK, s.capacity)
    sizes = {
        "blocks": block_floats(s.heads, s.head_dim, s.window, block) if s.window else 0,
        "logits": s.heads * s.capacity if s.scored else 0,
    }
    if native:
        sizes["part"] = part_floats(s.kv_heads, s.rows, s.head_dim, s.capacity)
        return {name: (count, torch.float32) for name, count in sizes.items()}
    width = s.kv_heads * s.head_dim
    chunk = chunk_rows(width, s.capacity) * width if s.scored else 0
    wide = widened_floats(s.kv_heads, s.rows, s.head_dim, s.capacity, s.dtype, s.capped)
    sizes["blocks"] = max(sizes["blocks"], chunk, wide)
    gathered = min(s.budget + TAIL_ROOM, s.capacity) if s.budget else 0
    rows = gathered * s.kv_heads * sum(row_widths(s.head_dim, s.dtype))
    return {name: (n, torch.float32) for name, n in sizes.items()} | {"rows": (rows, s.dtype)}
