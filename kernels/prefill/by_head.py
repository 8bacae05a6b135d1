"""Gathered prefill attention whose K/V heads have a list of their own: blocks of queries attend to
their heads' chosen rows of the past, to a local band and, causally, to themselves.
"""

from __future__ import annotations

import torch

from kernels.attention.reference import attend
from kernels.launch.dispatch import choose
from kernels.launch.softmax import PLAIN, Softmax
from kernels.prefill.dense import attend_chunk, attend_rows
from kernels.prefill.merge import merge
from kernels.prefill.native import attend_prompt, attends_prompt
from kernels.prefill.sparse import prefill_sparse_triton
from kernels.rows.forms import is_packed

# a block of queries: first, last, the first row of the band that all of them see, chosen rows
Block = tuple[int, int, int, int]


def prefill_by_head(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    blocks: list[Block],
    start: int,
    scale: float,
    backend: str = "auto",
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """Attend in blocks of queries to each K/V head's rows of `index` and to the rows from `local`
    up to each query's own.

    q [B, C, H, D]: queries at positions start .. start+C-1; k, v [B, Hkv, T, D] views of any
    strides, last dim contiguous, floats or packed; index [B, N, Hkv, K] int32; blocks: N tuples
    (first, last, local, count) as `prefill_sparse` takes them. Queries first .. last-1 under a K/V
    head h see the first `count` entries of index[:, n, h], which are distinct and below `local`.
    softmax: a cap on logits, and sinks. Returns out [B, C, H, D] in q.dtype. Raises ValueError for
    an unknown backend.
    """
    chosen = choose(backend, q, lambda: attends_prompt(q, k, v))
    # a head that stands for a sequence of its own would read another head's sink
    if chosen == "triton" and softmax.sinks is None:
        return _by_launch(q, k, v, index, blocks, start, scale, softmax)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # packed rows are unpacked where they are attended to, and those floats may be C++'s
    parts = backend if is_packed(k) or chosen == "triton" else chosen
    for n, (first, last, local, count) in enumerate(blocks):
        part = slice(first - start, last - start)
        for b in range(q.shape[0]):
            one = q[b, part], k[b], v[b], index[b, n, :, :count], local, first, scale, softmax
            if chosen == "reference":
                out[b, part] = by_head_ref(*one)
            elif chosen == "native":
                out[b, part] = _by_native(*one)
            else:
                out[b, part] = _by_torch(*one, parts)
    return out


def by_head_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    local: int,
    start: int,
    scale: float,
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """Reference of one block of one sequence: q [C, H, D] from position `start` on; k, v
    [Hkv, T, D]; index [Hkv, K] int32, distinct rows below `local` <= start. Returns [C, H, D].
    """
    stop, kept = start + len(q), index.shape[1]
    rows_k, rows_v = (_seen(t, index, local, stop) for t in (k, v))
    visible = torch.arange(1, len(q) + 1, device=q.device) + kept + start - local
    return attend(q, rows_k, rows_v, visible, scale, softmax=softmax)[0]


def _seen(rows: torch.Tensor, index: torch.Tensor, local: int, stop: int) -> torch.Tensor:
    """Copy each head's rows of index [Hkv, K], and rows local .. stop-1: rows [Hkv, T, D] floats or
    packed -> [Hkv, K + stop - local, D].
    """
    heads = torch.arange(len(rows), device=rows.device).unsqueeze(1)
    return torch.cat([rows[heads, index.long()], rows[:, local:stop]], dim=1)


def _by_native(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    local: int,
    start: int,
    scale: float,
    softmax: Softmax,
) -> torch.Tensor:
    """`by_head_ref` by the C++ kernel, which reads the chosen rows where they lie."""
    stop, kept = start + len(q), index.shape[1]
    given = scale, start, 0, index if kept else None, kept, local, softmax
    out, lse = attend_prompt(q, k[:, :stop], v[:, :stop], *given)
    return softmax.sunk(out, lse)[0]


def _by_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    local: int,
    start: int,
    scale: float,
    softmax: Softmax,
    backend: str,
) -> torch.Tensor:
    """`by_head_ref` by torch's operators: the rows that all queries see, then the block itself,
    merged by log-sum-exp.
    """
    one, parts = q[None], []
    if index.shape[1] or local < start:
        rows_k, rows_v = (_seen(t, index, local, start)[None] for t in (k, v))
        parts.append(attend_rows(one, rows_k, rows_v, scale, False, softmax, backend))
    parts.append(attend_chunk(one, k[None], v[None], start, scale, softmax, backend))
    whole = merge(parts, torch.float32) if len(parts) > 1 else parts[0]
    return softmax.sunk(*whole)[0][0].to(q.dtype)


def _by_launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    index: torch.Tensor,
    blocks: list[Block],
    start: int,
    scale: float,
    softmax: Softmax,
) -> torch.Tensor:
    """By the kernel of one list, to which each K/V head is a sequence of one: a launch for all
    blocks of a sequence.
    """
    heads, outs = k.shape[1], []
    for one, k_b, v_b, lists in zip(q, k, v, index):
        by_head = one.unflatten(1, (heads, -1)).transpose(0, 1)  # [Hkv, C, G, D]
        given = lists.transpose(0, 1), blocks, start, scale, softmax
        out = prefill_sparse_triton(by_head, k_b[:, None], v_b[:, None], *given)
        outs.append(out.transpose(0, 1).flatten(1, 2))
    return torch.stack(outs)
