"""Dense prefill: a chunk of queries attends causally to all K and V before it and to itself.

Parts are merged by their log-sum-exp (kernels/prefill/merge.py). The past needs no mask, so the
queries of a group are folded into one long run of queries and no K/V head is repeated. Only the
chunk itself is causal. No mask of any size is built, and activations are O(chunk).
"""

from __future__ import annotations

import functools

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.reference import attend
from kernels.launch.dispatch import choose
from kernels.launch.isa import fuses
from kernels.launch.shapes import card
from kernels.launch.softmax import PLAIN, Softmax
from kernels.prefill.merge import Part, take_part
from kernels.prefill.native import attend_prompts, attends_prompt
from kernels.prefill.tiled import attend_tiles
from kernels.rows.forms import is_packed, unpack, unpack_keys

# rows of the past at a time: the fused CPU kernel packs a copy of all its bfloat16 K and V, and a
# 16-bit dtype that the CPU emulates becomes float32
PAST_BLOCK = 8192
_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cuda = torch.ops.aten._scaled_dot_product_flash_attention
_efficient_cuda = torch.ops.aten._scaled_dot_product_efficient_attention
_cudnn_cuda = torch.ops.aten._scaled_dot_product_cudnn_attention
MOST_FLASH = 256  # elements of a head that torch's flash kernel takes
# rows of a GPU's smallest block of the past. cuDNN builds a plan per new shape, which takes tenths
# of a second, so it reads blocks of this times a power of two: 7 shapes up to a million tokens.
# Published for an H100 at 16K rows of 128: cuDNN 595 TFLOP/s, torch's flash kernel 370.
CUDNN_BLOCK = 8192
LARGEST_BLOCK = CUDNN_BLOCK << 6
# of rows that become floats in memory, and of an offloaded layer's stream
COPIED_BLOCK = CUDNN_BLOCK << 2


def has_cudnn(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether cuDNN's attention runs here and is the faster one: sm_90 and later, 16 bits, heads of
    at most 128. It is tried once, since a driver or a build may lack it.
    """
    found = card(device)
    if found is None or found.capability < (9, 0) or dtype == torch.float32 or head_dim > 128:
        return False
    return _runs_cudnn(device, dtype, head_dim)


@functools.cache
def _runs_cudnn(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    rows = torch.zeros(1, 1, 128, head_dim, device=device, dtype=dtype)
    try:
        _cudnn_cuda(rows, rows, rows, None, True, 0.0, False, False, scale=1.0)
    except RuntimeError:
        return False
    return True


def past_parts(
    start: int, on_cpu: bool, cudnn: bool, packed: bool = False
) -> list[tuple[int, int, bool]]:
    """Cut the rows 0 .. start-1 of the past: [(first, stop, whether cuDNN reads them)].

    A CPU reads blocks of PAST_BLOCK. A GPU reads blocks of CUDNN_BLOCK times a power of two by
    cuDNN where it has it, largest first, one for each binary digit of the past; the rest, below
    CUDNN_BLOCK, in one pass of the flash kernel. packed: rows become floats in memory, on any GPU
    at most COPIED_BLOCK at a time.
    """
    if on_cpu:
        return [(i, min(start, i + PAST_BLOCK), False) for i in range(0, start, PAST_BLOCK)]
    parts, first = [], 0
    block = COPIED_BLOCK if packed else LARGEST_BLOCK
    while (cudnn or packed) and block >= CUDNN_BLOCK:
        if start - first >= block:
            parts.append((first, first + block, cudnn))
            first += block
        else:
            block //= 2
    return parts + ([(first, start, False)] if first < start else [])


def fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    cudnn: bool = False,
    seen: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run torch's fused attention: (out [B, H, C, D], lse [B, H, C]).

    q, k, v have equally many heads; `causal` needs equally many queries and rows. cudnn: only
    without `causal`, since its mask is aligned to the first row, not to the last. seen: bool
    [C, rows] of which row a query sees, on a CPU; the lse of one that sees none is not defined.
    """
    if q.device.type == "cpu":
        kind = q.dtype if fuses(q.dtype, q.shape[2]) else torch.float32
        mask = None
        if seen is not None:
            mask = torch.zeros(seen.shape, dtype=kind).masked_fill_(~seen, float("-inf"))[
                None, None
            ]
        given = q.to(kind), k.to(kind), v.to(kind), 0.0, causal
        out, lse = _flash_cpu(*given, attn_mask=mask, scale=scale)
        return out.to(q.dtype), lse
    if cudnn:
        out, lse, *_ = _cudnn_cuda(q, k, v, None, True, 0.0, False, False, scale=scale)
        return out, lse.reshape(out.shape[:3])  # some versions leave a last dimension of 1
    if _efficient(q):
        out, lse, *_ = _efficient_cuda(q, k, v, None, True, 0.0, causal, scale=scale)
    else:
        out, lse, *_ = _flash_cuda(q, k, v, 0.0, causal, scale=scale)
    return out, lse[:, :, : q.shape[2]]  # the efficient kernel rounds its rows up


def _efficient(q: torch.Tensor) -> bool:
    """Whether the memory-efficient kernel attends on a GPU: the flash kernel knows 16 bits and
    heads of up to MOST_FLASH only.
    """
    return q.dtype == torch.float32 or q.shape[-1] > MOST_FLASH


def prefill_dense_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    scale: float,
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """Reference of `prefill_dense`, same arguments and result; loops over the batch and holds every
    score in float32.
    """
    out = torch.empty_like(q)
    stop = start + q.shape[1]
    visible = torch.arange(start + 1, stop + 1, device=q.device)
    for b in range(q.shape[0]):
        out[b], _ = attend(q[b], k[b, :, :stop], v[b, :, :stop], visible, scale, softmax=softmax)
    return out


def prefill_dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    scale: float,
    backend: str = "auto",
    softmax: Softmax = PLAIN,
) -> torch.Tensor:
    """Attend with a chunk at positions start .. start+C-1, each query to rows 0 .. its position.

    q [B, C, H, D]; k, v [B, Hkv, T, D] views of any strides, last dim contiguous, the chunk already
    written, floats or packed; all sequences begin at `start`. scale: of the logits, 1/sqrt(D).
    softmax: a cap on logits, and sinks. Returns out [B, C, H, D] in q.dtype. Raises ValueError for
    an unknown backend.
    """
    chosen = choose(backend, q)
    if chosen == "reference":
        return prefill_dense_ref(q, k, v, start, scale, softmax)
    # in float32 torch would build the mask, and every score; cuDNN reads blocks of the past
    blocks = start >= CUDNN_BLOCK and has_cudnn(q.device, q.dtype, q.shape[-1])
    # and whatever the flash kernel lacks, torch would do with every score
    whole = chosen == "triton" and not _efficient(q) and not blocks and not is_packed(k)
    if whole and softmax.plain:
        return prefill_dense_cuda(q, k, v, start, scale)
    return prefill_dense_lse(q, k, v, start, scale, softmax, backend)[0]


def prefill_dense_cuda(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    """`prefill_dense` by torch's fused attention in 16 bits, same arguments and result: its
    bottom-right causal mask is a flag of the kernel, not a tensor. Floats only.
    """
    # imported here: it pulls in torch.compile's machinery, 1.3 s
    from torch.nn.attention.bias import causal_lower_right

    stop = start + q.shape[1]
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k[:, :, :stop],
        v[:, :, :stop],
        scale=scale,
        enable_gqa=True,
        attn_mask=causal_lower_right(q.shape[1], stop),
    )
    return out.transpose(1, 2)


def prefill_dense_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    scale: float,
    softmax: Softmax = PLAIN,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`prefill_dense` with the log-sum-exp of every query's logits, same arguments.

    Returns (out [B, C, H, D] in q.dtype, lse [B, C, H] float32). Raises ValueError for an unknown
    backend.
    """
    rows = slice(0, start + q.shape[1])
    chosen = choose(backend, q, lambda: attends_prompt(q, k, v))
    if chosen == "native":
        whole = attend_prompts(q, k[:, :, rows], v[:, :, rows], scale, start, softmax=softmax)
        return softmax.sunk(*whole)
    if softmax.cap:
        tiles = attend_tiles(q, k[:, :, rows], v[:, :, rows], scale, softmax, start, 0, chosen)
        return softmax.sunk(*tiles)
    # packed rows are unpacked first, and those floats may be C++'s
    backend = backend if is_packed(k) else chosen
    chunk = attend_chunk(q, k, v, start, scale, backend=backend)
    past = k[:, :, :start], v[:, :, :start]
    found = attend_past(q, *past, scale, chunk, backend=backend)
    assert found is not None
    found = softmax.sunk(*found)
    return found[0].to(q.dtype), found[1]


def attend_past(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    so_far: Part | None,
    softmax: Softmax = PLAIN,
    backend: str = "auto",
) -> Part | None:
    """Attend to rows that every query sees, in the parts of `past_parts`, and merge them with
    `so_far`, (out [B, C, H, D], lse [B, C, H] float32) or None.

    Arguments and errors as `attend_rows`. Returns (out, float32 if anything was merged, lse);
    `so_far` without any row.
    """
    cudnn = has_cudnn(q.device, q.dtype, q.shape[-1])
    on_cpu = q.device.type == "cpu"
    if not is_packed(k):
        backend = choose(backend, q, lambda: k.shape[2] > 0 and attends_prompt(q, k, v))
        if backend == "native":
            part = attend_prompts(q, k, v, scale, None, softmax=softmax)
            return part if so_far is None else take_part(so_far, part, backend)
    for first, stop, by_cudnn in past_parts(k.shape[2], on_cpu, cudnn, is_packed(k)):
        rows = slice(first, stop)
        part = attend_rows(q, k[:, :, rows], v[:, :, rows], scale, by_cudnn, softmax, backend)
        so_far = part if so_far is None else take_part(so_far, part, backend)
    return so_far


def attend_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    cudnn: bool = False,
    softmax: Softmax = PLAIN,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend without a mask: every query sees every row.

    q [B, C, H, D]; k, v [B, Hkv, n, D], floats of q's dtype or packed, last dim contiguous; cudnn:
    by cuDNN's kernel (`has_cudnn`); softmax: its cap, while sinks are left to whoever merges the
    parts. Returns (out [B, C, H, D] in q.dtype, lse [B, C, H] float32). Raises ValueError for an
    unknown backend.
    """
    if is_packed(k) and q.device.type == "cpu":
        # in 16 bits the values would be rounded once more
        wide = torch.promote_types(q.dtype, torch.float32)
        rows = unpack_keys(k, wide), unpack(v, wide)
        out, lse = attend_rows(q.to(wide), *rows, scale, cudnn, softmax, backend)
        return out.to(q.dtype), lse
    chosen = choose(backend, q, lambda: attends_prompt(q, k, v))
    if chosen == "native":
        return attend_prompts(q, k, v, scale, None, softmax=softmax)
    if softmax.cap:
        return attend_tiles(q, k, v, scale, softmax, backend=chosen)
    batch, chunk, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    folded = (
        q.view(batch, chunk, kv_heads, group, dim)
        .permute(0, 2, 3, 1, 4)
        .reshape(batch, kv_heads, group * chunk, dim)
    )
    out, lse = fused(folded, unpack_keys(k, q.dtype), unpack(v, q.dtype), False, scale, cudnn)
    out = (
        out.view(batch, kv_heads, group, chunk, dim)
        .permute(0, 3, 1, 2, 4)
        .reshape(batch, chunk, heads, dim)
    )
    return out, lse.float().reshape(batch, kv_heads, group, chunk).permute(0, 3, 1, 2).reshape(
        batch, chunk, heads
    )


def attend_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    start: int,
    scale: float,
    softmax: Softmax = PLAIN,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend causally with a chunk to itself: rows start .. start+C-1 of k and v.

    k, v [B, Hkv, >= start + C, D]; else arguments, result and errors as `attend_rows`. K/V heads
    are repeated here, for the rows of the chunk only: the fused CPU kernel wants as many as there
    are query heads.
    """
    group = q.shape[2] // k.shape[1]
    rows = slice(start, start + q.shape[1])
    own = k[:, :, rows], v[:, :, rows]
    if softmax.cap and q.device.type != "cpu":
        return attend_tiles(q, *own, scale, softmax, 0, backend=backend)
    if is_packed(k) and q.device.type == "cpu":
        # in 16 bits the values would be rounded once more
        wide = torch.promote_types(q.dtype, torch.float32)
        own = unpack_keys(own[0], wide), unpack(own[1], wide)
        out, lse = attend_chunk(q.to(wide), *own, 0, scale, softmax, backend)
        return out.to(q.dtype), lse
    own = unpack_keys(own[0], q.dtype), unpack(own[1], q.dtype)
    chosen = choose(backend, q, lambda: attends_prompt(q, *own))
    if chosen == "native":
        return attend_prompts(q, *own, scale, 0, softmax=softmax)
    if softmax.cap:
        return attend_tiles(q, *own, scale, softmax, 0, backend=chosen)
    rows_k, rows_v = (t.repeat_interleave(group, dim=1) if group > 1 else t for t in own)
    out, lse = fused(q.transpose(1, 2), rows_k, rows_v, True, scale)
    return out.transpose(1, 2), lse.float().view(q.shape[0], q.shape[2], q.shape[1]).transpose(1, 2)
