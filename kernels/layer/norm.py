"""RMSNorm of the few rows of a decode step, one program a row (arXiv 1910.07467)."""

from __future__ import annotations

import torch

from kernels.launch.pdl import dependent, wait_for_last_kernel
from kernels.launch.shapes import power_of_two
from kernels.launch.triton import tl, triton


def normalize_rows_ref(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Reference of `normalize_rows`, same arguments."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def normalize_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide each row of x [..., N], contiguous, by its root mean square and scale it by
    weight [N], by the Triton kernel of this file.

    float32 inside, rounded to x's dtype before the weight, as transformers does. Returns a new
    tensor of x's shape and dtype.
    """
    out, size = torch.empty_like(x), x.shape[-1]
    block = power_of_two(size)
    norm_kernel[(x.numel() // size,)](
        x,
        weight,
        out,
        size,
        eps,
        BLOCK=block,
        num_warps=max(1, min(16, block // 256)),
        **dependent(x),
    )
    return out


@triton.jit
def norm_kernel(x, weight, out, size, eps, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Normalise one row: grid (rows)."""
    kind = out.dtype.element_ty
    d = tl.arange(0, BLOCK)
    w = tl.load(weight + d, mask=d < size, other=0.0)
    wait_for_last_kernel(DEPENDENT)
    at = tl.program_id(0).to(tl.int64) * size + d
    row = tl.load(x + at, mask=d < size, other=0.0).to(tl.float32)
    row = row * tl.rsqrt(tl.sum(row * row, 0) / size + eps)
    y = row.to(kind).to(tl.float32) * w.to(tl.float32)
    tl.store(out + at, y.to(kind), mask=d < size)
