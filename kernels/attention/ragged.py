"""Decode attention to K and V of one flat run of rows, in which every K/V head has rows of its own,
as many as it likes: what a layer reads whose heads have kept different numbers of tokens (Ada-KV).

A row may stand for several: the log of how often it counts is added to its logit (RazorAttention).
"""

from __future__ import annotations

from typing import Any

import torch

from kernels.attention.cpu import attend_sequence
from kernels.attention.merge import merge, merge_when_last, merging
from kernels.attention.native import attend_own_rows, attends
from kernels.attention.reference import attend
from kernels.attention.scratch import Scratch, ScratchShape, make_scratch
from kernels.attention.split import (
    PER_PROCESSOR,
    SPARSE_CHUNK,
    decode_config,
    query_tile,
    store_partial,
)
from kernels.launch.dispatch import choose
from kernels.launch.pdl import dependent, wait_for_last_kernel
from kernels.launch.shapes import DENSE_SPLIT, needs_wide, processors
from kernels.launch.triton import tl, triton
from kernels.rows.forms import is_packed, step_value_sums, wide_stored_queries
from kernels.rows.int4_tiles import columns
from kernels.rows.tiles import (
    load_step_keys,
    load_values,
    scaled_logits,
    softmax_tile,
    step_logits,
    step_queries,
)


def decode_ragged_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    logs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Reference of `decode_ragged`, same arguments and result: one head after the other, in
    float32.
    """
    out = torch.empty_like(q)
    for part, own, rows_k, rows_v, mine in _heads(q, k, v, starts, lengths, out, logs):
        own.copy_(attend(part, rows_k, rows_v, [rows_k.shape[1]], scale, logs=mine)[0])
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
    logs: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with one query to the rows of each head: K/V head h has rows starts[h] ..
    starts[h] + lengths[h] - 1.

    q [1, 1, H, D]; k, v [N, D], or packed, last dim contiguous, the new token's rows already
    written; starts, lengths int64 [Hkv], contiguous, on q's device; most: at least every length,
    which sizes a launch, so that nobody waits for the device; scale: 1/sqrt(D). scratch: None
    allocates. logs: float32 [N], contiguous, added to each row's logit: the log of how often a row
    counts; None: each counts once. Returns out [1, 1, H, D] in q.dtype, zeros under a head without
    rows. Mutates scratch. Raises ValueError for an unknown backend, tables that do not fit the
    heads or the rows, or too small a scratch.
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
    if logs is not None and not (logs.dtype == torch.float32 and logs.shape == k.shape[:1]):
        raise ValueError(
            f"decode_ragged: found logs {tuple(logs.shape)} in {logs.dtype} beside {len(k)} rows, "
            "expected torch.float32, one of each row"
        )
    chosen = choose(backend, q, lambda: attends(k, v, q.shape[3]))
    if chosen == "native":
        parts = None if scratch is None else scratch.part
        return attend_own_rows(q, k, v, starts, lengths, most, scale, parts, logs)
    if chosen == "triton":
        return decode_ragged_triton(q, k, v, starts, lengths, most, scale, scratch, logs)
    if chosen == "cpu":
        return decode_ragged_cpu(q, k, v, starts, lengths, scale, scratch, logs)
    return decode_ragged_ref(q, k, v, starts, lengths, scale, logs)


def decode_ragged_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    scratch: Scratch | None = None,
    logs: torch.Tensor | None = None,
) -> torch.Tensor:
    """`decode_ragged` on CPU tensors by torch's operators, same arguments and result: a product has
    rows of one count, so a head's are its own. Mutates scratch.blocks.
    """
    out, blocks = torch.zeros_like(q), None if scratch is None else scratch.blocks
    for part, own, rows_k, rows_v, mine in _heads(q, k, v, starts, lengths, out, logs):
        if rows_k.shape[1]:
            own.copy_(attend_sequence(part, rows_k, rows_v, scale, blocks, logs=mine)[0])
    return out


def _heads(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    logs: torch.Tensor | None,
) -> list[tuple[Any, ...]]:
    """(its queries [1, G, D], their place in out, its rows of k and v [1, n, D], and of logs [n] or
    None) of each head.
    """
    group = q.shape[2] // len(starts)
    found: list[tuple[Any, ...]] = []
    for head, (first, n) in enumerate(zip(starts.tolist(), lengths.tolist())):
        mine, rows = slice(head * group, head * group + group), slice(first, first + n)
        own = None if logs is None else logs[rows]
        found.append((q[0, :, mine], out[0, :, mine], k[None, rows], v[None, rows], own))
    return found


@triton.jit
def ragged_kernel(
    q,
    k,
    v,
    starts,
    lengths,
    logs,
    part,
    lse,
    chunk_part,
    chunk_lse,
    out,
    out_lse,
    tickets,
    scale,
    sqh,
    skt,
    svt,
    QT: tl.constexpr,
    G: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    LOGS: tl.constexpr,
    MERGES: tl.constexpr,
    CHUNK: tl.constexpr,
    RB: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Attend to one split of SPLIT rows of one kv head.

    Grid (splits, 1, kv_heads): to what merges, a head is a sequence of its own. Programs beyond a
    head's rows leave at once, but for the first split's. LOGS: whether `logs` are added.
    """
    wait_for_last_kernel(DEPENDENT)
    s = tl.program_id(0)
    h = tl.program_id(2)
    n = tl.load(lengths + h).to(tl.int32)
    first = s * SPLIT
    used = tl.maximum(tl.cdiv(n, SPLIT), 1)
    if s < used:
        r, _, _, live, place = query_tile(0, 1, h, 0, sqh, QT, G, M)
        stop = tl.minimum(n - first, SPLIT)
        # 64 bits once, 32 inside a split
        row = tl.load(starts + h) + first
        k += row * skt
        v += row * svt
        if LOGS:
            logs += row
        d = columns(k, D, DP)
        rows = step_queries(q, place, live, d, k, scale, D)
        like = tl.zeros([1], out.dtype.element_ty)
        m = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        acc = tl.zeros([M, DP], tl.float32)
        for begin in range(0, stop, BLOCK):
            t = begin + tl.arange(0, BLOCK)
            at = t.to(tl.int64) if WIDE else t
            k_tile = load_step_keys(k, at, skt, d, t < stop, like, D)
            scores = step_logits(rows, k_tile, k, scale)
            scores = scaled_logits(scores, k, at, skt, t < stop, D)
            if LOGS:
                scores += tl.load(logs + t, mask=t < stop, other=0.0)[None, :]
            scores = tl.where((t < stop)[None, :], scores, float("-inf"))
            values = load_values(v, at, svt, d, t < stop, like, D, False)
            m, total, acc = softmax_tile(
                scores, values, v, at, svt, t < stop, m, total, acc, like, D
            )
        slot = (h.to(tl.int64) * tl.num_programs(0) + s) * G
        store_partial(part, lse, slot, r, d, live, m, total, acc, D)
        if MERGES > 0:
            merge_when_last(
                part, lse, chunk_part, chunk_lse, out, out_lse, tickets, lse, G, s, used, h, 0, G,
                G, MERGES, CHUNK, False, G, RB, D, DP,
            )  # fmt: skip


def ragged_split(most: int, kv_heads: int, sms: int, slots: int) -> int:
    """Rows of one program: the longest of 256, 128, 64 and 32 that still makes PER_PROCESSOR
    programs for each of `sms` SMs, if all heads hold `most`; DENSE_SPLIT at most, which fits any
    scratch, and so many as `slots`, results that the scratch has room for per K/V head, allow.
    """
    split = next((n for n in (256, 128, 64) if kv_heads * -(-most // n) >= PER_PROCESSOR * sms), 32)
    while split < DENSE_SPLIT and -(-most // split) > slots:
        split *= 2
    return split


def decode_ragged_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    most: int,
    scale: float,
    scratch: Scratch | None = None,
    logs: torch.Tensor | None = None,
) -> torch.Tensor:
    """`decode_ragged` by the Triton kernel of this file, same arguments, result and errors.

    Launches: one, which also merges (with a scratch without tickets a launch per level more). A
    scratch that serves `decode_dense` of `most` rows serves this.
    """
    heads, head_dim, kv_heads = q.shape[2], q.shape[3], len(starts)
    group, sms = heads // kv_heads, processors(q.device)
    if scratch is None:
        capacity = DENSE_SPLIT * -(-most // ragged_split(most, kv_heads, sms, most))
        shape = ScratchShape(1, 1, heads, kv_heads, head_dim, max(1, capacity))
        scratch = make_scratch(shape, q.device, "triton")
    split = ragged_split(most, kv_heads, sms, scratch.lse.numel() // heads)
    splits = max(1, -(-most // split))
    packed = k.dtype if is_packed(k) else None
    # tiles of 8 KB, as chosen rows have: short splits then are several, in flight from the start
    config = decode_config(1, group, head_dim, q.itemsize, 8192, packed)
    slots = heads * splits
    scratch.require(part=slots * head_dim, lse=slots, out_lse=heads)
    out, q = q.new_empty(kv_heads, 1, group, head_dim), wide_stored_queries(q, k)
    block = min(config.block, split)
    ragged_kernel[(splits, 1, kv_heads)](
        q,
        k,
        v,
        starts,
        lengths,
        starts if logs is None else logs,
        *scratch.partial(out),
        scale,
        q.stride(2),
        k.stride(0),
        v.stride(0),
        SPLIT=split,
        BLOCK=block,
        WIDE=needs_wide(k.stride(0), v.stride(0)),
        LOGS=logs is not None,
        **merging(scratch, kv_heads, 1, splits, SPARSE_CHUNK, head_dim),
        **config.launch(group, head_dim),
        **dependent(q),
    )
    merge(scratch, out, lengths, 1, splits, split, block, SPARSE_CHUNK)
    return step_value_sums(out.view(1, 1, heads, head_dim), v)
