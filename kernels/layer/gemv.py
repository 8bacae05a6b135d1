"""Products of a decode step: 1 to 8 rows times a weight, each weight read once, with what follows
the product (bias, residual, SwiGLU) in its last lines.

On a GPU the library's product of one row works on tiles of 64 outputs, splits the sum to fill the
card and adds the parts in a second launch; the residual and the activation are launches of their
own. Here one program takes a few outputs, so that 4096 of them are 1024 programs (7.8 for each of
132 SMs) and no sum is split.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.launch.pdl import dependent, wait_for_last_kernel
from kernels.launch.shapes import power_of_two
from kernels.launch.triton import tl, triton

MOST_ROWS = 8
# programs that give each of 132 SMs four
ENOUGH_PROGRAMS = 528
# weights of one output that a program holds at a time: with 4 outputs 8 KB in 16 bits, in flight
# for the next round while it multiplies; 8 such programs an SM are twice what its bandwidth needs
STEP = 1024


def multiply_rows_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Reference of `multiply_rows`, same arguments."""
    y = F.linear(x, weight, bias)
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    if residual is not None:
        y = residual + y
    return y.to(out_dtype or x.dtype)


def multiply_rows(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply the rows of x [..., I] by weight [O, I], by the Triton kernel of this file.

    x, contiguous, and weight, contiguous, of one dtype; at most MOST_ROWS rows. bias [O] is added,
    then residual [..., O]. gated: the first half of the outputs goes through SiLU and scales the
    second (SwiGLU, arXiv 2002.05202), so there are O / 2. Sums are float32 and rounded to the dtype
    after the product, after SiLU and at the end, where torch's operators round. out_dtype: of the
    result, x's by default. Returns [..., O or O / 2]. Raises ValueError for more rows.
    """
    inputs, outputs = weight.shape[1], weight.shape[0] // (2 if gated else 1)
    rows = x.numel() // inputs
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"x: found {rows} rows, expected 1 to {MOST_ROWS}")
    out = torch.empty(*x.shape[:-1], outputs, dtype=out_dtype or x.dtype, device=x.device)
    held = outputs_of(outputs, 2 if gated else 4)
    padded = power_of_two(rows)
    product_kernel[(-(-outputs // held),)](
        x,
        weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        out,
        outputs,
        inputs,
        ROWS=rows,
        PADDED=padded,
        HELD=held,
        STEP=max(16, min(STEP // padded, power_of_two(inputs))),
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        num_warps=4,
        **dependent(x),
    )
    return out


def outputs_of(outputs: int, most: int) -> int:
    """Outputs of one program: at most `most`, fewer where there would not be ENOUGH_PROGRAMS."""
    held = most
    while held > 1 and -(-outputs // held) < ENOUGH_PROGRAMS:
        held //= 2
    return held


@triton.jit
def weight_tile(weight, n, k, outputs, inputs):
    """Load rows n of the weight at columns k: [HELD, STEP], 0 outside."""
    at = n.to(tl.int64)[:, None] * inputs + k[None, :]
    return tl.load(
        weight + at,
        mask=(n < outputs)[:, None] & (k < inputs)[None, :],
        other=0.0,
        eviction_policy="evict_first",
    )


@triton.jit
def row_sums(tile, x, k, inputs, ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Multiply a tile of weights [HELD, STEP] by every row of x at columns k, unsummed:
    [HELD, STEP] for one row, [HELD, PADDED, STEP] for several.
    """
    if ROWS == 1:
        row = tl.load(x + k, mask=k < inputs, other=0.0).to(tl.float32)
        product = tile.to(tl.float32) * row[None, :]
    else:
        r = tl.arange(0, PADDED)
        rows = tl.load(
            x + r[:, None] * inputs + k[None, :],
            mask=(r < ROWS)[:, None] & (k < inputs)[None, :],
            other=0.0,
        ).to(tl.float32)
        product = tile.to(tl.float32)[:, None, :] * rows[None, :, :]
    return product


@triton.jit
def finished(acc, bias, n, outputs, kind, ROWS: tl.constexpr, BIAS: tl.constexpr):
    """Sum what was left unsummed, add the bias and round as a product would: float32 [HELD] or
    [HELD, PADDED].
    """
    if ROWS == 1:
        y = tl.sum(acc, 1)
        if BIAS:
            y += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)
    else:
        y = tl.sum(acc, 2)
        if BIAS:
            y += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
    return y.to(kind).to(tl.float32)


@triton.jit
def opened(gate, up, kind):
    """SwiGLU of finished sums, rounded after SiLU and after the product."""
    y = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up
    return y.to(kind).to(tl.float32)


@triton.jit
def store_rows(
    y,
    residual,
    out,
    n,
    outputs,
    kind,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Add the residual to finished outputs n of every row, and store them."""
    if ROWS == 1:
        at = n
        inside = n < outputs
    else:
        r = tl.arange(0, PADDED)
        at = r[None, :] * outputs + n[:, None]
        inside = (n < outputs)[:, None] & (r < ROWS)[None, :]
    if RESIDUAL:
        y = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32) + y
        y = y.to(kind)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def product_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    outputs,
    inputs,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
    HELD: tl.constexpr,
    STEP: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute HELD outputs of every row: grid (tiles of outputs).

    The weights of a round are loaded while those before them are multiplied, the first before the
    kernel waits for x. Sums stay apart per column until the end, so a round has no reduction.
    """
    kind = weight.dtype.element_ty
    n = tl.program_id(0) * HELD + tl.arange(0, HELD)
    k = tl.arange(0, STEP)
    other = weight + tl.cast(outputs, tl.int64) * inputs
    next_tile = weight_tile(weight, n, k, outputs, inputs)
    if GATED:
        next_other = weight_tile(other, n, k, outputs, inputs)
    wait_for_last_kernel(DEPENDENT)
    if ROWS == 1:
        acc = tl.zeros([HELD, STEP], tl.float32)
    else:
        acc = tl.zeros([HELD, PADDED, STEP], tl.float32)
    if GATED:
        acc_other = acc
    for start in range(0, inputs, STEP):
        tile = next_tile
        next_tile = weight_tile(weight, n, start + STEP + k, outputs, inputs)
        if GATED:
            tile_other = next_other
            next_other = weight_tile(other, n, start + STEP + k, outputs, inputs)
            acc_other += row_sums(tile_other, x, start + k, inputs, ROWS, PADDED)
        acc += row_sums(tile, x, start + k, inputs, ROWS, PADDED)
    y = finished(acc, bias, n, outputs, kind, ROWS, BIAS)
    if GATED:
        up = finished(acc_other, bias + outputs, n, outputs, kind, ROWS, BIAS)
        y = opened(y, up, kind)
    store_rows(y, residual, out, n, outputs, kind, ROWS, PADDED, RESIDUAL)
