"""What lies between the products of a layer for the many rows of a prompt's chunk, one launch each:
rotation, residual with norm, SwiGLU. All of it is bound by memory, so that each reads its rows once
and writes them once. Norms alone are kernels/layer/norm.py's.

They round where torch's operators round: to the rows' dtype after the residual, after the norm
before its weight, and after silu.
"""

from __future__ import annotations

import torch

from kernels.launch.shapes import power_of_two
from kernels.launch.triton import tl, triton

HEADS = 8  # of one token that a program rotates: with 128 dimensions 2 KB
COLUMNS = 2048  # of one row that a program of SwiGLU computes


def rotate_rows_ref(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int
) -> torch.Tensor:
    """Reference of `rotate_rows`, same arguments."""
    wide = torch.promote_types(qkv.dtype, torch.float32)
    first, second = qkv[:, :, :heads].to(wide).chunk(2, dim=-1)
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(qkv.dtype)


def rotate_rows(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int
) -> torch.Tensor:
    """Rotate the pairs (i, i + D/2) of the first `heads` heads of qkv [B, S, N, D], contiguous, by
    the Triton kernel of this file.

    cos, sin float32 [1 or B, S, D/2], contiguous. Returns a new tensor [B, S, heads, D].
    """
    batch, length, held, dim = qkv.shape
    out = torch.empty(batch, length, heads, dim, dtype=qkv.dtype, device=qkv.device)
    rotate_rows_kernel[(batch * length, -(-heads // HEADS))](
        qkv,
        cos,
        sin,
        out,
        cos.shape[0] * length,
        held,
        heads,
        HALF=dim // 2,
        HP=power_of_two(dim // 2),
        HEADS=HEADS,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["angles"])
def rotate_rows_kernel(
    qkv,
    cos,
    sin,
    out,
    angles,
    held,
    heads,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Rotate HEADS heads of one token: grid (B * S, heads / HEADS)."""
    kind = out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    h = tl.arange(0, HP)
    inside = (head < heads)[:, None] & (h < HALF)[None, :]
    angle = (token % angles) * HALF + h
    c = tl.load(cos + angle, mask=h < HALF, other=0.0)[None, :]
    s = tl.load(sin + angle, mask=h < HALF, other=0.0)[None, :]
    at = qkv + ((token * held + head) * 2 * HALF)[:, None] + h[None, :]
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    to = out + ((token * heads + head) * 2 * HALF)[:, None] + h[None, :]
    tl.store(to, (first * c - second * s).to(kind), mask=inside)
    tl.store(to + HALF, (second * c + first * s).to(kind), mask=inside)


def add_normalize_rows_ref(
    x: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Reference of `add_normalize_rows`, same arguments."""
    x = x + part
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return x, weight * wide.to(x.dtype)


def add_normalize_rows(
    x: torch.Tensor, part: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add what a half of a layer computed to the residual, and normalise the sum, by the Triton
    kernel of this file.

    x, part [..., N] contiguous, weight [N]. Returns (x + part, its norm), new tensors.
    """
    summed, normed, size = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    block = power_of_two(size)
    add_norm_kernel[(x.numel() // size,)](
        x,
        part,
        weight,
        summed,
        normed,
        size,
        eps,
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
    )
    return summed, normed


@triton.jit
def add_norm_kernel(x, part, weight, summed, normed, size, eps, BLOCK: tl.constexpr):
    """Add and normalise one row: grid (rows)."""
    kind = summed.dtype.element_ty
    d = tl.arange(0, BLOCK)
    inside = d < size
    at = tl.program_id(0).to(tl.int64) * size + d
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    row += tl.load(part + at, mask=inside, other=0.0).to(tl.float32)
    row = row.to(kind)
    tl.store(summed + at, row, mask=inside)
    wide = row.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    w = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + at, (wide.to(kind).to(tl.float32) * w).to(kind), mask=inside)


def swiglu_rows_ref(gate_up: torch.Tensor) -> torch.Tensor:
    """Reference of `swiglu_rows`, same argument."""
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def swiglu_rows(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up of gate_up [..., 2 N], contiguous, by the Triton kernel of this file:
    [..., N], new.
    """
    size = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], size, dtype=gate_up.dtype, device=gate_up.device)
    rows = gate_up.numel() // (2 * size)
    block = min(COLUMNS, power_of_two(size))
    swiglu_kernel[(rows, -(-size // block))](
        gate_up, out, size, BLOCK=block, num_warps=max(1, min(8, block // 256))
    )
    return out


@triton.jit
def swiglu_kernel(gate_up, out, size, BLOCK: tl.constexpr):
    """Compute BLOCK columns of one row: grid (rows, columns / BLOCK)."""
    kind = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < size
    gate = tl.load(gate_up + row * 2 * size + d, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + d, mask=inside, other=0.0).to(tl.float32)
    opened = (gate / (1 + tl.exp(-gate))).to(kind).to(tl.float32)
    tl.store(out + row * size + d, (opened * up).to(kind), mask=inside)
