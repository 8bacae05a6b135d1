"""The first matrix of the experts that a decode step's rows chose, with the activation: each expert
is read once for all of its rows.

The grid has a place for each expert that could have been chosen; programs beyond the list leave. A
program multiplies all rows of the step, of which those that did not choose its expert are zero and
are not read: tensor cores take 16 rows at a time whether one is wanted or all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.experts.choose import Choice
from kernels.experts.stack import Stack
from kernels.launch.pdl import dependent, wait_for_last_kernel
from kernels.launch.triton import tl, triton
from kernels.layer.gemv import HELD, STEPS, row_tile, rows_of, weight_tile
from kernels.quant.gemv import HELD as WORDS_HELD
from kernels.quant.gemv import (
    ROWS,
    counts_of,
    places_of_scales,
    places_of_words,
    rows_of_lanes,
    sums_of_blocks,
    whole_lanes,
    words_launch,
    words_of,
)


class Activation(NamedTuple):
    """What lies between an expert's two matrices. kind: "silu" and "gelu_tanh" act on a gate that
    multiplies up, gate in the first half (SwiGLU and GEGLU, arXiv 2002.05202); "clamped" is
    gpt-oss's, whose gate and up take turns: gate is at most `limit` and up within it, and (up + 1)
    * gate * sigmoid(alpha * gate) is left; "relu2" is the square of what is positive, without a
    gate (arXiv 2109.08668).
    """

    kind: str = "silu"
    limit: float = 0.0
    alpha: float = 0.0

    @property
    def made(self) -> int:
        """Outputs of the first matrix for each of the activation."""
        return 1 if self.kind == "relu2" else 2


SILU = Activation()


def activated(made: torch.Tensor, activation: Activation = SILU) -> torch.Tensor:
    """Apply an expert's activation to what its first matrix made, [..., 2 W], or [..., W] where
    there is no gate: [..., W].
    """
    kind, limit, alpha = activation
    if kind == "relu2":
        return F.relu(made).square()
    if kind == "clamped":
        gate, up = made[..., ::2].clamp(max=limit), made[..., 1::2].clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))
    gate, up = made.chunk(2, dim=-1)
    return (F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")) * up


def open_experts_ref(
    x: torch.Tensor, stack: Stack, choice: Choice, activation: Activation = SILU
) -> torch.Tensor:
    """Reference of `open_experts`, same arguments; 0 where that writes nothing."""
    out = x.new_zeros(*choice.shares.shape, stack.outputs // activation.made)
    listed = range(int(choice.listed))
    for slot, number, bits in zip(listed, choice.experts.tolist(), choice.members.tolist()):
        weight, bias = stack.expert(number)
        dense = weight if isinstance(weight, torch.Tensor) else weight.rows(slice(None), x.dtype)
        for row in range(len(x)):
            if bits >> row & 1:
                out[slot, row] = activated(F.linear(x[row], dense, bias), activation)
    return out


def open_experts(
    x: torch.Tensor, stack: Stack, choice: Choice, activation: Activation = SILU
) -> torch.Tensor:
    """Multiply the rows of x [R, I], contiguous, by the first matrix of the experts that they chose
    and activate, by the Triton kernels of this file: [D, R, W] in x's dtype.

    stack: gate and up, [2 W, I] of each expert, or [W, I] where there is no gate; choice: of these
    rows, at most MOST_ROWS. Only rows of listed experts that chose them are written. Sums are
    float32, rounded to the dtype after the bias, after the gate's activation and at the end. A
    row's bits do not depend on the other rows.
    """
    (kind, limit, alpha), made = activation, activation.made
    width, inputs = stack.outputs // made, stack.inputs
    rows, (room, _) = rows_of(x, inputs), choice.shares.shape
    out = torch.empty(room, rows, width, dtype=x.dtype, device=x.device)
    weight, bias = stack.weight, x if stack.bias is None else stack.bias
    chosen = choice.experts, choice.members, choice.listed
    named = dict(ACTIVATION=kind, MADE=made, BIAS=stack.bias is not None, num_warps=4)
    if isinstance(weight, torch.Tensor):
        open_kernel[(-(-width // HELD), room)](
            x, weight, bias, *chosen, out, rows, width, inputs, weight.shape[0], limit, alpha,
            HELD=HELD,
            STEP=STEPS[x.itemsize],
            STAGES=3,
            **named,
            **dependent(x),
        )  # fmt: skip
        return out
    x, held = whole_lanes(x), WORDS_HELD // made
    launch = words_launch(weight, x)
    if x.itemsize == 2 and torch.version.hip is None:
        # under 128 registers gates and ups in turn spill 16 bytes, under 168 still 8; either way
        # one program fills an SM
        launch["maxnreg"] = 255
    open_words_kernel[(-(-width // held), room, -(-rows // ROWS))](
        x, *words_of(weight), bias, *chosen, out, rows, width, x.shape[-1], *counts_of(weight, x),
        limit, alpha,
        HELD=held,
        **{**named, **launch},
        **dependent(x),
    )  # fmt: skip
    return out


@triton.jit
def outputs_of_expert(width, HELD: tl.constexpr, MADE: tl.constexpr, ACTIVATION: tl.constexpr):
    """Number the outputs of a program, and the rows of an expert's matrix that make them: gates,
    then ups, whether they take turns or lie in halves. Outputs beyond the last have the last row.
    """
    n = tl.program_id(0) * HELD + tl.arange(0, HELD)
    return n, row_of_output(tl.arange(0, MADE * HELD), width, HELD, ACTIVATION)


@triton.jit
def row_of_output(i, width, HELD: tl.constexpr, ACTIVATION: tl.constexpr):
    """Number the rows of an expert's matrix at places i of a program, as `outputs_of_expert`."""
    first = tl.minimum(tl.program_id(0) * HELD + i % HELD, width - 1)
    if ACTIVATION == "clamped":
        m = 2 * first + i // HELD
    else:
        m = first + (i // HELD) * width
    return m


@triton.jit
def store_opened(
    sums,
    bias,
    out,
    n,
    m,
    r,
    rows,
    width,
    limit,
    alpha,
    kind: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
):
    """Store the activation of sums [gates and ups, rows] as outputs n of rows r."""
    if BIAS:
        sums += tl.load(bias + m).to(tl.float32)[:, None]
    y = sums.to(kind).to(tl.float32)
    if ACTIVATION == "relu2":
        y = tl.where(y < 0.0, 0.0, y)  # NaN stays
        y = y * y
    else:
        gate, up = tl.split(tl.permute(tl.reshape(y, [2, n.shape[0], r.shape[0]]), [1, 2, 0]))
        if ACTIVATION == "clamped":
            # comparisons that leave NaN as it is
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
            y = (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
        else:
            turned = gate
            if ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 is the sigmoid of 2 u
                turned = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
            y = (gate / (1.0 + tl.exp(-turned))).to(kind).to(tl.float32) * up
    at = r[None, :] * width + n[:, None]
    tl.store(out + at, y.to(kind), mask=(n < width)[:, None] & (r < rows)[None, :])


@triton.jit
def rows_of_expert(members, rows, first, COUNT: tl.constexpr):
    """Number COUNT rows from `first` on; `rows`, one past the last, where one is no member."""
    r = first + tl.arange(0, COUNT)
    return tl.where(((members >> r) & 1) != 0, r, rows)


@triton.jit(do_not_specialize=["rows"])
def open_kernel(
    x,
    weight,
    bias,
    experts,
    members,
    listed,
    out,
    rows,
    width,
    inputs,
    stored,
    limit,
    alpha,
    HELD: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MADE: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute HELD outputs of every row of one expert: grid (tiles of outputs, experts)."""
    wait_for_last_kernel(DEPENDENT)
    slot = tl.program_id(1)
    if slot >= tl.load(listed):
        return
    n, m = outputs_of_expert(width, HELD, MADE, ACTIVATION)
    m += tl.load(experts + slot) * (MADE * width)
    r = rows_of_expert(tl.load(members + slot), rows, 0, 16)
    k = tl.arange(0, STEP)
    acc = tl.zeros([MADE * HELD, 16], tl.float32)
    for start in tl.range(0, inputs, STEP, num_stages=STAGES):
        tile = weight_tile(weight, m, start + k, stored, inputs)
        columns = row_tile(x, r, start + k, rows, inputs)
        acc = tl.dot(tile, tl.trans(columns), acc, input_precision="ieee")
    out += slot.to(tl.int64) * rows * width
    kind: tl.constexpr = x.dtype.element_ty
    store_opened(acc, bias, out, n, m, r, rows, width, limit, alpha, kind, ACTIVATION, BIAS)


@triton.jit(do_not_specialize=["rows", "carrier"])
def open_words_kernel(
    x,
    words,
    scales,
    offsets,
    bias,
    experts,
    members,
    listed,
    out,
    rows,
    width,
    inputs,
    blocks,
    groups,
    carrier,
    limit,
    alpha,
    HELD: tl.constexpr,
    ROWS: tl.constexpr,
    ALONG: tl.constexpr,
    SETS: tl.constexpr,
    UNITS: tl.constexpr,
    PARTS: tl.constexpr,
    PER_GROUP: tl.constexpr,
    JOINED: tl.constexpr,
    ADDED: tl.constexpr,
    OFFSETS: tl.constexpr,
    WHOLE: tl.constexpr,
    EVEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    MADE: tl.constexpr,
    BIAS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute HELD outputs of ROWS rows of one expert in few bits: grid (tiles of outputs, experts,
    tiles of rows).
    """
    wait_for_last_kernel(DEPENDENT)
    slot, first = tl.program_id(1), tl.program_id(2) * ROWS
    if slot >= tl.load(listed):
        return
    mine = tl.load(members + slot)
    if ((mine >> first) & ((1 << ROWS) - 1)) == 0:
        return
    TILES: tl.constexpr = MADE * HELD // 16
    WARPS: tl.constexpr = ALONG * TILES
    n, m = outputs_of_expert(width, HELD, MADE, ACTIVATION)
    above = tl.load(experts + slot) * (MADE * width)
    r = rows_of_expert(mine, rows, first, ROWS)
    sums = sums_of_blocks(
        x, words, scales, offsets,
        above + row_of_output(places_of_words(WARPS, TILES), width, HELD, ACTIVATION),
        above + row_of_output(places_of_scales(WARPS, TILES), width, HELD, ACTIVATION),
        tl.minimum(first + rows_of_lanes(WARPS), rows - 1),
        inputs, blocks, groups, carrier,
        TILES, ALONG, SETS, UNITS, PARTS, PER_GROUP, JOINED, ADDED, OFFSETS, WHOLE, EVEN, False,
    )  # fmt: skip
    out += slot.to(tl.int64) * rows * width
    kind: tl.constexpr = x.dtype.element_ty
    store_opened(
        sums, bias, out, n, above + m, r, rows, width, limit, alpha, kind, ACTIVATION, BIAS
    )
