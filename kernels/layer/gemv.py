"""Products of a decode step: 1 to 16 rows times a weight, each weight read once, with what follows
the product (bias, residual, SwiGLU) in its last lines.

On a GPU the library's product of one row works on tiles of 64 outputs, splits the sum to fill the
card and adds the parts in a second launch; the residual and the activation are launches of their
own. Here one program takes 16 outputs and no sum is split: 4096 of them are 256 programs.

Rows are padded to the 16 that tensor cores take, and their number is no constant of the kernel: 1
and 16 rows run the same code. So a row is summed in one order, whatever goes with it, and its bits
do not depend on its neighbours.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.launch.pdl import dependent, wait_for_last_kernel
from kernels.launch.shapes import processors
from kernels.launch.triton import tl, triton

MOST_ROWS = 16
HELD = 16  # outputs of a program
# columns of a round by bytes of an element: 8 KB of weights in 16 bits. Products of float32 run in
# registers, which a round's columns have to fit
STEPS = {2: 256, 4: 32}
# programs for each SM, with fewer of which they have more rounds in flight instead: 4096 outputs
# are 1.94 for each of 132
ENOUGH = 1.9


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
    result, x's by default. A row's bits do not depend on the other rows. Returns
    [..., O or O / 2]. Raises ValueError for more rows.
    """
    inputs, outputs = weight.shape[1], weight.shape[0] // (2 if gated else 1)
    out = torch.empty(*x.shape[:-1], outputs, dtype=out_dtype or x.dtype, device=x.device)
    programs = -(-outputs // HELD)
    product_kernel[(programs,)](
        x,
        weight,
        weight if bias is None else bias,
        x if residual is None else residual,
        out,
        rows_of(x, inputs),
        outputs,
        inputs,
        HELD=HELD,
        STEP=STEPS[x.itemsize],
        STAGES=3 if gated else 4 if programs >= ENOUGH * processors(x.device) else 6,
        GATED=gated,
        BIAS=bias is not None,
        RESIDUAL=residual is not None,
        num_warps=4,
        **dependent(x),
    )
    return out


def rows_of(x: torch.Tensor, inputs: int) -> int:
    """Count the rows of x [..., I]. Raises ValueError for none and for more than MOST_ROWS."""
    rows = x.numel() // inputs
    if not 1 <= rows <= MOST_ROWS:
        raise ValueError(f"x: found {rows} rows, expected 1 to {MOST_ROWS}")
    return rows


@triton.jit
def row_of_place(i, outputs, HELD: tl.constexpr, GATED: tl.constexpr):
    """Number the rows of the weight at places i of a program: HELD outputs, one past the last row
    or more for what lies beyond.

    GATED: HELD rows of the weight's first half, then the same of the second.
    """
    n = tl.program_id(0) * HELD + i % HELD
    if GATED:
        m = tl.where(n < outputs, n + (i // HELD) * outputs, 2 * outputs)
    else:
        m = n
    return m


@triton.jit
def outputs_of_program(outputs, HELD: tl.constexpr, GATED: tl.constexpr):
    """Number the outputs of a program, the rows of the weight that make them (`row_of_place`), and
    all of those.
    """
    n = tl.program_id(0) * HELD + tl.arange(0, HELD)
    if GATED:
        m, stored = row_of_place(tl.arange(0, 2 * HELD), outputs, HELD, GATED), 2 * outputs
    else:
        m, stored = n, outputs
    return n, m, stored


@triton.jit
def weight_tile(weight, m, k, stored, inputs):
    """Load rows m of the weight at columns k: [outputs, columns], 0 outside."""
    return tl.load(
        weight + m.to(tl.int64)[:, None] * inputs + k[None, :],
        mask=(m < stored)[:, None] & (k < inputs)[None, :],
        other=0.0,
    )


@triton.jit
def row_tile(x, r, k, rows, inputs):
    """Load rows r of x at columns k: [rows, columns], 0 outside."""
    return tl.load(
        x + r[:, None] * inputs + k[None, :],
        mask=(r < rows)[:, None] & (k < inputs)[None, :],
        other=0.0,
    )


@triton.jit
def store_rows(
    sums,
    bias,
    residual,
    out,
    n,
    m,
    r,
    rows,
    outputs,
    stored,
    kind: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Store outputs n of rows r from sums [rows of the weight, rows], rounded to `kind` wherever
    torch's operators round: after the bias, SwiGLU and the residual.
    """
    if BIAS:
        sums += tl.load(bias + m, mask=m < stored, other=0.0).to(tl.float32)[:, None]
    y = sums.to(kind).to(tl.float32)
    if GATED:
        apart = tl.reshape(y, [2, n.shape[0], r.shape[0]])
        gate, up = tl.split(tl.permute(apart, [1, 2, 0]))
        y = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32) * up
        y = y.to(kind).to(tl.float32)
    at = r[None, :] * outputs + n[:, None]
    inside = (n < outputs)[:, None] & (r < rows)[None, :]
    if RESIDUAL:
        y = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32) + y
        y = y.to(kind)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    x,
    weight,
    bias,
    residual,
    out,
    rows,
    outputs,
    inputs,
    HELD: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute HELD outputs of every row: grid (tiles of outputs).

    The first columns' weights are loaded before the kernel waits for x and multiplied last, so that
    those of the rounds are on their way meanwhile.
    """
    n, m, stored = outputs_of_program(outputs, HELD, GATED)
    r = tl.arange(0, 16)
    k = tl.arange(0, STEP)
    first = weight_tile(weight, m, k, stored, inputs)
    wait_for_last_kernel(DEPENDENT)
    first_rows = row_tile(x, r, k, rows, inputs)
    acc = tl.zeros([m.shape[0], 16], tl.float32)
    for start in tl.range(STEP, inputs, STEP, num_stages=STAGES):
        tile = weight_tile(weight, m, start + k, stored, inputs)
        columns = row_tile(x, r, start + k, rows, inputs)
        acc = tl.dot(tile, tl.trans(columns), acc, input_precision="ieee")
    acc = tl.dot(first, tl.trans(first_rows), acc, input_precision="ieee")
    kind: tl.constexpr = weight.dtype.element_ty
    store_rows(
        acc, bias, residual, out, n, m, r, rows, outputs, stored, kind, GATED, BIAS, RESIDUAL
    )
