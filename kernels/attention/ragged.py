"""Decode attention to K and V of one flat run of rows, in which every K/V head has rows of its own,
as many as it likes: what a layer reads whose heads have kept different numbers of tokens (Ada-KV).
"""

from __future__ import annotations

import torch

from kernels.attention.cpu import attend_sequence
from kernels.attention.native import attend_own_rows, attends
from kernels.attention.reference import attend_alone
from kernels.attention.scratch import Scratch
from kernels.launch.dispatch import choose


def decode_ragged_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Reference of `decode_ragged`, same arguments and result: one head after the other, in
    float32.
    """
    out = torch.empty_like(q)
    for part, own, rows_k, rows_v in _heads(q, k, v, starts, lengths, out):
        own.copy_(attend_alone(part, rows_k, rows_v, [rows_k.shape[1]], scale)[0])
    return out


def decode_ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    most: int,
    scale: float,
    scratch: Scratch | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """Attend with one query to the rows of each head: K/V head h has rows starts[h] ..
    starts[h] + lengths[h] - 1.

    q [1, 1, H, D]; k, v [N, D], or packed, last dim contiguous, the new token's rows already
    written; starts, lengths int64 [Hkv], contiguous, on q's device; most: at least every length,
    which sizes a launch, so that nobody waits for the device; scale: 1/sqrt(D). scratch: None
    allocates. Returns out [1, 1, H, D] in q.dtype, zeros under a head without rows. Mutates
    scratch. Raises ValueError for an unknown backend, tables that do not fit the heads, or too
    small a scratch.
    """
    heads, units = q.shape[2], len(starts)
    if len(lengths) != units or not units or heads % units:
        raise ValueError(
            f"decode_ragged: found {units} starts and {len(lengths)} lengths under {heads} query "
            "heads, expected one of each per K/V head"
        )
    if not starts.dtype == lengths.dtype == torch.int64:
        raise ValueError(
            f"decode_ragged: found starts in {starts.dtype} and lengths in {lengths.dtype}, "
            "expected torch.int64"
        )
    chosen = choose(backend, q, lambda: attends(k, v, q.shape[3]))
    if chosen == "native":
        parts = None if scratch is None else scratch.part
        return attend_own_rows(q, k, v, starts, lengths, most, scale, parts)
    if chosen == "cpu":
        return decode_ragged_cpu(q, k, v, starts, lengths, scale, scratch)
    return decode_ragged_ref(q, k, v, starts, lengths, scale)


def decode_ragged_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    scratch: Scratch | None = None,
) -> torch.Tensor:
    """`decode_ragged` on CPU tensors by torch's operators, same arguments and result: a product has
    rows of one count, so a head's are its own. Mutates scratch.blocks.
    """
    out, blocks = torch.zeros_like(q), None if scratch is None else scratch.blocks
    for part, own, rows_k, rows_v in _heads(q, k, v, starts, lengths, out):
        if rows_k.shape[1]:
            own.copy_(attend_sequence(part, rows_k, rows_v, scale, blocks)[0])
    return out


def _heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
) -> list[tuple[torch.Tensor, ...]]:
    """(its queries [1, G, D], their place in out, its rows of k and v [1, n, D]) of each head."""
    group = q.shape[2] // len(starts)
    found: list[tuple[torch.Tensor, ...]] = []
    for head, (first, n) in enumerate(zip(starts.tolist(), lengths.tolist())):
        mine, rows = slice(head * group, head * group + group), slice(first, first + n)
        found.append((q[0, :, mine], out[0, :, mine], k[None, rows], v[None, rows]))
    return found
