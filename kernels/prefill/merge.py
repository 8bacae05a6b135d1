"""Merge attention over disjoint sets of rows by the log-sum-exp of each.

A prompt's past is read in a few parts (kernels/prefill/dense.py). On a GPU one small kernel takes
the next part into what was merged before it: it reads the part once, and reads and writes the sum
in place. torch's operators hold three more tensors of float32 and pass over them six times.
"""

from __future__ import annotations

import functools

import torch

from kernels.launch.dispatch import choose
from kernels.launch.shapes import power_of_two
from kernels.launch.triton import tl, triton

Part = tuple[torch.Tensor, torch.Tensor]  # out [.., D] and log-sum-exp [..]
ROWS = 16  # of one program: 8 KB of a part of 128 columns in 16 bits, twice of the sum


def merge(parts: list[Part], dtype: torch.dtype) -> Part:
    """Merge attention over disjoint sets of rows: the same pair over all of them.

    parts: [(out [.., D], lse [..])], float32 or narrower out and float32 lse; a part weighs
    exp(lse) / their sum. Returns (out in `dtype`, lse float32). A part without rows has lse -inf
    and adds nothing; a query that no part shows a row keeps out 0 and lse -inf.
    """
    lse = torch.logsumexp(torch.stack([part[1] for part in parts]), dim=0)
    # a finite base: -inf - -inf would be NaN
    base = lse.clamp(min=torch.finfo(lse.dtype).min)
    out = functools.reduce(
        torch.add, (part[0].float() * torch.exp(part[1] - base).unsqueeze(-1) for part in parts)
    )
    return out.to(dtype), lse


def take_part(so_far: Part, part: Part, backend: str = "auto") -> Part:
    """Merge one more part: (out float32 [.., D], lse float32 [..]) over both sets of rows.

    so_far, part: as in `merge`. A sum that is float32 already may be overwritten.
    """
    if choose(backend, part[0]) != "triton":
        return merge([so_far, part], torch.float32)
    return take_part_triton(so_far, part)


def take_part_triton(so_far: Part, part: Part) -> Part:
    """`take_part` on a GPU, same arguments."""
    out, lse = (t.contiguous() for t in so_far)
    new, new_lse = (t.contiguous() for t in part)
    dim = out.shape[-1]
    rows = lse.numel()
    merged = out if out.dtype == torch.float32 else out.new_empty(out.shape, dtype=torch.float32)
    merge_part_kernel[(-(-rows // ROWS),)](
        out,
        lse,
        new,
        new_lse,
        merged,
        rows,
        D=dim,
        DP=power_of_two(dim),
        ROWS=ROWS,
        num_warps=4,
    )
    return merged, lse


@triton.jit
def merge_part_kernel(
    out,
    lse,
    new,
    new_lse,
    merged,
    rows,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """merged [rows, D] = both outs weighed; lse [rows] in place. `merged` may be `out`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, DP)
    inside = row < rows
    one = tl.load(lse + row, mask=inside, other=float("-inf"))
    other = tl.load(new_lse + row, mask=inside, other=float("-inf"))
    top = tl.maximum(one, other)
    # rows that neither part sees must not make NaN
    base = tl.where(top == float("-inf"), 0.0, top)
    mine = tl.exp(one - base)
    theirs = tl.exp(other - base)
    total = mine + theirs
    scale = 1.0 / tl.where(total > 0.0, total, 1.0)
    at = row[:, None] * D + column[None, :]
    mask = inside[:, None] & (column[None, :] < D)
    a = tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(new + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(merged + at, a * (mine * scale)[:, None] + b * (theirs * scale)[:, None], mask=mask)
    tl.store(lse + row, base + tl.log(total), mask=inside & (total > 0.0))
