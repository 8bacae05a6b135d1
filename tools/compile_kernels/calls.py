"""Runs the launcher of a configuration on meta tensors: shapes without memory."""

from __future__ import annotations

import torch

from kernels.attention.dense import decode_dense
from kernels.attention.ragged import decode_ragged
from kernels.attention.scratch import ScratchShape, make_scratch
from kernels.attention.sparse import decode_sparse
from kernels.experts.mix import mix_experts
from kernels.experts.open import SILU, Activation
from kernels.experts.stack import Stack
from kernels.launch.softmax import PLAIN, Softmax
from kernels.layer.gemv import multiply_rows
from kernels.layer.norm import normalize_rows
from kernels.layer.prompt_fused import add_normalize_rows, rotate_rows, swiglu_rows
from kernels.layer.rotate_store import rotate_store
from kernels.layer.store import store_step
from kernels.prefill.block_sparse import BLOCK, attend_blocks
from kernels.prefill.merge import take_part
from kernels.prefill.sparse import prefill_sparse
from kernels.prefill.tiled import attend_tiles
from kernels.quant.gemm import multiply_tiles
from kernels.quant.gemv import multiply_few_bits
from kernels.quant.words import Words, row_words
from kernels.recurrent.conv import conv_chunk
from kernels.recurrent.delta import Tail, gated_delta_chunk
from kernels.recurrent.ssd import ssd_chunk
from kernels.recurrent.step import Held, NetWeights, net_step
from kernels.rows.forms import DTYPES, row_widths
from kernels.select.column_scores import column_scores
from kernels.select.topk import select_topk
from kernels.select.window_scores import window_scores
from kernels.tier.gather import move_rows
from kernels.tier.lru_slots import make_slots, plan_slots
from tools.compile_kernels.cases import HOST_LAUNCHERS, PREFILL_LAUNCHERS, STEP_LAUNCHERS, Case

# grids do not enter a kernel: any long bank compiles the same code
CAPACITY, BUDGET = 131072, 2048
# experts, those of a row, hidden size, width, activation and what the router has, of gpt-oss-20b,
# Qwen3-30B-A3B, MiniMax-M2, Gemma 4 26B-A4B and Nemotron 3 Nano
MIXTURES: tuple[tuple[int, int, int, int, Activation, str], ...] = (
    (32, 4, 2880, 2880, Activation("clamped", 7.0, 1.702), ""),
    (128, 8, 2048, 768, SILU, ""),
    (256, 8, 3072, 1536, SILU, "sigmoids"),
    (128, 8, 2816, 704, Activation("gelu_tanh"), "scales"),
    (128, 6, 2688, 1856, Activation("relu2"), "sigmoids"),
)


def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A tensor that has a shape and no memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def by_head(case: Case) -> tuple[torch.Tensor, ...]:
    """K and V [1, 8, CAPACITY, D] of a case on meta, packed where it says so."""
    kind = DTYPES.get(case.packed, getattr(torch, case.dtype))
    widths = row_widths(case.head_dim, kind)
    return tuple(meta(1, 8, CAPACITY, width, dtype=kind) for width in widths)


def by_token(case: Case, tokens: int, layers: int = 1) -> tuple[torch.Tensor, ...]:
    """K and V [1, 8, tokens, D] as views of rows that hold a token's of so many layers."""
    kind = DTYPES.get(case.packed, getattr(torch, case.dtype))
    widths = [8 * width for width in row_widths(case.head_dim, kind)]
    memory = meta(1, tokens, layers * sum(widths), dtype=kind)
    parts = memory[..., -sum(widths) :].split(widths, -1)
    return tuple(part.unflatten(-1, (8, -1)).transpose(1, 2) for part in parts)


def words(kind: str, outputs: int, inputs: int) -> Words:
    """A weight as the engine rounds it for a GPU: int4 in groups of 32 (or those named) with
    offsets, int8 of 64.
    """
    kind, _, said = kind.partition(":")
    group, offsets = (int(said or 32), True) if kind == "int4" else (64, False)
    scales = meta(outputs, inputs // group, dtype=torch.bfloat16)
    values = meta(outputs, row_words(kind, inputs))
    return Words(kind, (outputs, inputs), values, scales, scales if offsets else None, group)


def experts(case: Case, count: int, outputs: int, inputs: int, bias: bool) -> Stack:
    """A matrix of every expert, in what a case packs its weights; with biases, as gpt-oss has."""
    rows, dtype = count * outputs, getattr(torch, case.dtype)
    floats = meta(rows, inputs, dtype=dtype)
    weight = words(case.packed, rows, inputs) if case.packed else floats
    return Stack(count, weight, meta(rows, dtype=dtype) if bias else None)


def softmax_of(case: Case) -> Softmax:
    """What is particular in a case's softmax."""
    if case.softmax == "sinks":
        return Softmax(sinks=meta(8 * case.group, dtype=torch.float32))
    return Softmax(50.0) if case.softmax else PLAIN


def call(case: Case) -> None:
    """Run the launcher of a case on meta tensors."""
    if case.launcher in HOST_LAUNCHERS:
        call_host(case.launcher)
        return
    if case.launcher in STEP_LAUNCHERS:
        call_step(case)
        return
    dtype, scale = getattr(torch, case.dtype), case.head_dim**-0.5
    heads = 8 * case.group
    queries = 16 if case.launcher == "window" else case.queries
    q = meta(1, queries, heads, case.head_dim, dtype=dtype)
    scores = meta(1, CAPACITY, dtype=torch.float32)
    scratch, softmax = None, softmax_of(case)
    if case.launcher == "apart":
        largest = ScratchShape(1, queries, heads, 8, case.head_dim, CAPACITY, BUDGET)
        scratch = make_scratch(largest, "meta", "triton").merging_apart()
    # gathered layers are token-major, the others head-major
    if case.launcher in ("sparse", "apart"):
        k, v = by_token(case, CAPACITY)
        index, one = meta(1, 1, BUDGET), meta(1)
        weights = (None,) if softmax is not PLAIN else (None, meta(1, BUDGET, dtype=torch.float32))
        for logs in weights:
            decode_sparse(q, k, v, index, one, one, one, scale, scratch, "triton", softmax, logs)
        if case.launcher == "sparse":
            return
    if case.launcher == "lists":
        k, v = by_token(case, CAPACITY)
        index, counts, one = meta(1, 8, BUDGET), meta(1, 8), meta(1)
        decode_sparse(q, k, v, index, counts, one, one, scale, None, "triton", softmax)
        return
    if case.launcher in PREFILL_LAUNCHERS:
        call_prefill(case)
        return
    k, v = by_head(case)
    if case.launcher == "ragged":
        flat, tables = (k.flatten(0, 2), v.flatten(0, 2)), meta(2, 8, dtype=torch.int64)
        for logs in (None, meta(len(flat[0]), dtype=torch.float32)):
            decode_ragged(q, *flat, *tables, BUDGET, scale, backend="triton", logs=logs)
    elif case.launcher == "topk":
        select_topk(scores, meta(1), meta(1), meta(1), meta(1, BUDGET), meta(1), backend="triton")
    elif case.launcher == "window":
        for kind in ("softmax", "raw"):
            alpha = meta(16, dtype=torch.float32)
            given = q, k, meta(1), scale, alpha, kind, scores
            window_scores(*given, backend="triton", softmax=softmax)
    elif case.launcher == "scored":
        for kind in ("softmax", "raw"):
            largest = ScratchShape(1, queries, heads, 8, case.head_dim, CAPACITY, scored=True)
            scratch = make_scratch(largest, "meta", "triton")
            for ranked in (None, meta(1)):
                decode_dense(
                    q, k, v, meta(1), scale, scores, kind, scratch, "triton", ranked, softmax
                )
    else:
        given = q, k, v, meta(1), scale
        decode_dense(*given, scratch=scratch, backend="triton", softmax=softmax)


def call_step(case: Case) -> None:
    """Run a launcher around attention at the sizes of a model of 8 kv heads: hidden as wide as the
    query heads, an MLP of 3.5 times that, as in Llama-3-8B.
    """
    dtype, heads, queries = getattr(torch, case.dtype), 8 * case.group, case.queries
    hidden = heads * case.head_dim
    inner = hidden * 7 // 2
    x = meta(1, queries, hidden, dtype=dtype)
    if case.launcher == "norm":
        normalize_rows(x, meta(hidden, dtype=dtype), 1e-5)
        add_normalize_rows(x, x, meta(hidden, dtype=dtype), 1e-5)
        swiglu_rows(meta(1, queries, 2 * inner, dtype=dtype))
    elif case.launcher == "product":
        multiply_rows(x, meta(hidden, hidden, dtype=dtype))
        multiply_rows(x, meta(hidden, hidden, dtype=dtype), meta(hidden, dtype=dtype))
        multiply_rows(x, meta(2 * inner, hidden, dtype=dtype), gated=True)
        wide = meta(1, queries, inner, dtype=dtype)
        multiply_rows(wide, meta(hidden, inner, dtype=dtype), residual=x)
        multiply_rows(x, meta(128256, hidden, dtype=dtype), out_dtype=torch.float32)
    elif case.launcher == "few_bits":
        kind = case.packed or "int4"
        if case.packed:
            multiply_few_bits(x, words(kind, 128256, hidden), out_dtype=torch.float32)
        multiply_few_bits(x, words(kind, hidden, hidden), meta(hidden, dtype=dtype))
        multiply_few_bits(x, words(kind, 2 * inner, hidden), gated=True)
        wide = meta(1, queries, inner, dtype=dtype)
        multiply_few_bits(wide, words(kind, hidden, inner), residual=x)
    elif case.launcher == "experts":
        for count, best, width, inner, activation, has in MIXTURES:
            own, bias = meta(queries, width, dtype=dtype), activation.kind == "clamped"
            sigmoid, numbers = has == "sigmoids", meta(count, dtype=dtype)
            router = meta(count, width, dtype=dtype), numbers if bias or sigmoid else None
            up = experts(case, count, activation.made * inner, width, bias)
            down = experts(case, count, width, inner, bias)
            scaled = dict(routed=own, scale=numbers) if has == "scales" else {}
            given = (up, down), best, bias or has == "scales", activation, own, sigmoid
            mix_experts(own, router, *given, **scaled)
    elif case.launcher == "net":
        call_net(case)
    elif case.launcher == "ssd":
        call_ssd(case)
    elif case.launcher == "tiles":
        chunk = meta(512 if queries == 1 else queries, hidden, dtype=dtype)
        multiply_tiles(chunk, words(case.packed or "int4", hidden, hidden))
    else:
        qkv = meta(1, queries, heads + 16, case.head_dim, dtype=dtype)
        angle = meta(1, queries, case.head_dim // 2, dtype=torch.float32)
        for (k, v), twice in (
            (by_head(case), None),
            (by_token(case, 8192 + 2 * 384, 12), (8192, 384)),
        ):
            ring = meta(1, 128, heads, case.head_dim, dtype=dtype)
            at = meta(1, queries, dtype=torch.int64)
            rotate_store(qkv, angle, angle, k, v, ring, at, twice)
        rotate_rows(qkv, angle, angle, heads + 8)


def call_net(case: Case) -> None:
    """Run a gated delta net's step, and its prompt of some chunks, at the sizes of Qwen3.5: what is
    projected is q, k, v and z of a token in one row.
    """
    dtype, floats, dim = getattr(torch, case.dtype), torch.float32, case.head_dim
    keys, heads, rows, queries = 16, 16 * case.group, 32, case.queries
    channels = 2 * keys * dim + heads * dim
    sizes = (channels, 4), (heads,), (heads,), (dim,)
    weights = NetWeights(*(meta(*size, dtype=dtype) for size in sizes))
    ring = (1, keys, rows, dim), (1, heads, rows, dim), (1, heads, rows)
    state, inputs = meta(1, heads, dim, dim, dtype=floats), meta(1, rows, channels, dtype=dtype)
    held = Held(state, inputs, Tail(*(meta(*size, dtype=floats) for size in ring)))
    row = meta(1, queries, channels + heads * dim, dtype=dtype)
    rates, one = meta(1, queries, 2 * heads, dtype=dtype), meta(1, dtype=torch.int64)
    positions = meta(1, queries, dtype=torch.int64)
    net_step(row, rates, weights, held, one, positions, 1e-6, "triton")
    mixed = meta(1, 1024, channels + heads * dim, dtype=dtype)[..., :channels]
    convolved = conv_chunk(mixed, meta(1, 3, channels, dtype=dtype), weights.conv, "triton")
    q, k, v = convolved.split([keys * dim, keys * dim, heads * dim], -1)
    g = meta(1, 1024, heads, dtype=floats)
    q, k, v = (t.unflatten(-1, (-1, dim)) for t in (q, k, v))
    gated_delta_chunk(q, k, v, g, g, state, 8, "triton")


def call_ssd(case: Case) -> None:
    """Run the prompt of a Mamba-2 layer at the sizes of Nemotron-H: heads of 64, 8 groups."""
    dtype, floats, dim, groups = getattr(torch, case.dtype), torch.float32, case.head_dim, 8
    heads, tokens = groups * case.group, 1024
    channels = heads * 64 + 2 * groups * dim
    mixed = meta(1, tokens, channels + heads * 64, dtype=dtype)[..., :channels]
    given = mixed, meta(1, 3, channels, dtype=dtype), meta(channels, 4, dtype=dtype), "triton"
    convolved = conv_chunk(*given, meta(channels, dtype=dtype))
    x, b, c = convolved.split([heads * 64, groups * dim, groups * dim], -1)
    x, b, c = (t.unflatten(-1, (-1, d)) for t, d in ((x, 64), (b, dim), (c, dim)))
    g, state = meta(1, tokens, heads, dtype=floats), meta(1, heads, dim, 64, dtype=floats)
    ssd_chunk(c, b, x, g, g, meta(heads, dtype=floats), state, 8, "triton")


def call_host(launcher: str) -> None:
    """Run a launcher of the host tier at an 8B model's sizes: rows of 4 KB per layer, groups of 12
    layers, 2048 tokens, 8192 slots.
    """
    if launcher == "store":
        q_pre_rope, k, v = meta(1, 1, 48, 128, dtype=torch.bfloat16).split([32, 8, 8], dim=2)
        slots, ring = 4 * BUDGET, 384
        group = meta(slots + 2 * ring, 12, 2, 8, 128, dtype=torch.bfloat16)
        for (bank_k, bank_v), twice in (
            (meta(2, 1, 8, CAPACITY, 128, dtype=torch.bfloat16), None),
            (meta(CAPACITY, 2, 1, 8, 128, dtype=torch.bfloat16).permute(1, 2, 3, 0, 4), None),
            (group[:, 1:2].permute(2, 1, 3, 0, 4), (slots, ring)),
        ):
            store_step(
                k,
                v,
                q_pre_rope,
                bank_k,
                bank_v,
                meta(1, 128, 32, 128, dtype=torch.bfloat16),
                meta(1, 1, dtype=torch.int64),
                twice,
                backend="triton",
            )
        return
    slots = make_slots(CAPACITY, 4 * BUDGET, BUDGET, "meta")
    table, rows = meta(CAPACITY // 64, dtype=torch.int64), meta(4 * BUDGET, 12 * 1024)
    if launcher == "slots":
        plan_slots(meta(BUDGET), meta(1), slots, backend="triton")
    elif launcher == "home":
        move_rows(
            table,
            4096,
            12 * 4096,
            meta(2048, 1024),
            4096,
            0,
            2048,
            None,
            to_host=True,
            backend="triton",
        )
        move_rows(table, 4096, 12 * 4096, meta(65536, 1024), 0, 0, 65536, None, backend="triton")
    else:
        # a group's packed row, and one layer of it
        for part in (rows, rows[:, 1024:2048]):
            move_rows(
                table,
                4096,
                12 * 4096,
                part,
                slots.source,
                slots.target,
                slots.misses,
                None,
                moved=meta(1, dtype=torch.int64),
                backend="triton",
            )


def call_prefill(case: Case) -> None:
    """Run a prefill launcher on meta tensors: blocks of 256 (block-sparse: 128) queries of a chunk
    of 4096 at the bank's end.
    """

    dtype, scale, start = getattr(torch, case.dtype), case.head_dim**-0.5, CAPACITY - 4096
    q = meta(1, 4096, 8 * case.group, case.head_dim, dtype=dtype)
    edges = range(start, CAPACITY, 256)
    if case.launcher == "columns":
        k, _ = by_head(case)
        lse, sums = (
            meta(*shape, dtype=torch.float32)
            for shape in ((1, 4096, 8 * case.group), (1, 4, CAPACITY))
        )
        column_scores(
            q,
            k,
            lse,
            [(first, first + 256, first - 256) for first in edges[:4]],
            start,
            16,
            scale,
            sums,
            backend="triton",
            softmax=softmax_of(case),
        )
        return
    # layers that read everything are head-major
    if case.launcher == "capped":
        k, v = by_head(case)
        for first, window in ((start, 0), (start, 4096), (None, 0)):
            attend_tiles(q, k, v, scale, softmax_of(case), first, window, "triton")
        return
    if case.launcher == "parts":
        part = q, meta(*q.shape[:3], dtype=torch.float32)
        for so_far in (part, (q.float(), part[1])):  # the chunk itself, then what was merged
            take_part(so_far, part, "triton")
        return
    if case.launcher == "blocks":
        k, v = by_head(case)
        keep = meta(1, 8 * case.group, 4096 // BLOCK, CAPACITY // BLOCK, dtype=torch.bool)
        attend_blocks(q, k, v, keep, start, scale, backend="triton")
        return
    k, v = by_token(case, CAPACITY)
    blocks = [(first, first + 256, first - 256, 512) for first in edges]
    index = meta(1, len(edges), 512)
    prefill_sparse(q, k, v, index, blocks, start, scale, "triton", softmax_of(case))
