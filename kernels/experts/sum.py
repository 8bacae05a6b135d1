"""The last product of the experts that a decode step's rows chose, added up for each row.

A program has some outputs of every row and takes the listed experts one after the other, ascending,
so each is read once and a row's sum has one order, whatever goes with it: no atomics, and no launch
that adds. The experts are one loop, not one inside another: loads of the next one are on their way
while the last columns of this one are multiplied.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.experts.choose import Choice
from kernels.experts.open import rows_of_expert
from kernels.experts.stack import Stack
from kernels.launch.pdl import dependent, wait_for_last_kernel
from kernels.launch.triton import tl, triton
from kernels.layer.gemv import HELD, STEPS, row_tile, weight_tile
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

# 128 to 180 programs for 132 SMs are few, so more rounds are in flight: 5. A round's addresses hang
# on the number of its expert, which is loaded as many rounds ahead: the compiler halves the stages
STAGES = 11


def sum_experts_ref(
    opened: torch.Tensor, stack: Stack, choice: Choice, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Reference of `sum_experts`, same arguments."""
    rows, dtype = opened.shape[1], opened.dtype
    wide = torch.promote_types(dtype, torch.float32)
    out = torch.zeros(rows, stack.outputs, dtype=wide, device=opened.device)
    listed = range(int(choice.listed))
    for slot, number, bits in zip(listed, choice.experts.tolist(), choice.members.tolist()):
        weight, bias = stack.expert(number)
        dense = weight if isinstance(weight, torch.Tensor) else weight.rows(slice(None), dtype)
        for row in range(rows):
            if bits >> row & 1:
                part = F.linear(opened[slot, row], dense, bias).to(wide)
                out[row] += part * choice.shares[slot, row]
    return out.to(dtype) if residual is None else residual + out.to(dtype)


def sum_experts(
    opened: torch.Tensor, stack: Stack, choice: Choice, residual: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply opened [D, R, W], as `open_experts` leaves it, by the last matrix of its experts,
    weigh and add them for each row, by the Triton kernels of this file: [R, O] in opened's dtype.

    stack: [O, W] of each expert. residual [R, O] is added last. Sums are float32, rounded to the
    dtype after an expert's bias, after the sum and at the end. A row's bits do not depend on the
    other rows.
    """
    room, rows, inputs = opened.shape
    outputs, weight = stack.outputs, stack.weight
    out = torch.empty(rows, outputs, dtype=opened.dtype, device=opened.device)
    bias = opened if stack.bias is None else stack.bias
    added = opened if residual is None else residual
    chosen = choice.experts, choice.members, choice.shares, choice.listed
    named = dict(HELD=HELD, BIAS=stack.bias is not None, RESIDUAL=residual is not None, num_warps=4)
    if isinstance(weight, torch.Tensor):
        sum_kernel[(-(-outputs // HELD),)](
            opened, weight, bias, added, *chosen, out, rows, outputs, inputs, weight.shape[0],
            STEP=STEPS[opened.itemsize],
            STAGES=STAGES,
            **named,
            **dependent(opened),
        )  # fmt: skip
        return out
    opened = whole_lanes(opened)
    sum_words_kernel[(-(-outputs // WORDS_HELD), -(-rows // ROWS))](
        opened, *words_of(weight), bias, added, *chosen, out, rows, outputs, opened.shape[-1],
        *counts_of(weight, opened),
        **{**named, **words_launch(weight, opened), "HELD": WORDS_HELD},
        **dependent(opened),
    )  # fmt: skip
    return out


@triton.jit
def weighed(total, sums, bias, shares, m, r, rows, kind: tl.constexpr, BIAS: tl.constexpr):
    """Add an expert's sums [outputs, rows], weighed, to the total of the rows that chose it."""
    if BIAS:
        sums += tl.load(bias + m).to(tl.float32)[:, None]
    share = tl.load(shares + r, mask=r < rows, other=0.0)
    y = sums.to(kind).to(tl.float32) * share[None, :]
    return tl.where((r < rows)[None, :], total + y, total)


@triton.jit
def store_summed(
    total, residual, out, n, r, rows, outputs, kind: tl.constexpr, RESIDUAL: tl.constexpr
):
    """Store outputs n of rows r from their totals [outputs, rows]."""
    at = r[None, :] * outputs + n[:, None]
    inside = (n < outputs)[:, None] & (r < rows)[None, :]
    y = total.to(kind)
    if RESIDUAL:
        y = (tl.load(residual + at, mask=inside, other=0.0).to(tl.float32) + y).to(kind)
    tl.store(out + at, y, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def sum_kernel(
    opened,
    weight,
    bias,
    residual,
    experts,
    members,
    shares,
    listed,
    out,
    rows,
    outputs,
    inputs,
    stored,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    HELD: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute HELD outputs of every row: grid (tiles of outputs)."""
    n = tl.program_id(0) * HELD + tl.arange(0, HELD)
    held, k = tl.minimum(n, outputs - 1), tl.arange(0, STEP)
    kind: tl.constexpr = opened.dtype.element_ty
    wait_for_last_kernel(DEPENDENT)
    rounds = tl.load(listed) * tl.cdiv(inputs, STEP)
    start = 0
    acc = tl.zeros([HELD, 16], tl.float32)
    total = tl.zeros([HELD, 16], tl.float32)
    for _ in tl.range(0, rounds, num_stages=STAGES):
        at = start + k
        m = tl.load(experts) * outputs + held
        r = rows_of_expert(tl.load(members), rows, 0, 16)
        tile = weight_tile(weight, m, at, stored, inputs)
        columns = row_tile(opened, r, at, rows, inputs)
        acc = tl.dot(tile, tl.trans(columns), acc, input_precision="ieee")
        start += STEP
        if start >= inputs:
            total = weighed(total, acc, bias, shares, m, r, rows, kind, BIAS)
            acc = tl.zeros([HELD, 16], tl.float32)
            # the next of the list
            experts, members = experts + 1, members + 1
            shares, opened = shares + rows, opened + rows * inputs
            start = 0
    r = tl.arange(0, 16)
    store_summed(total, residual, out, n, r, rows, outputs, kind, RESIDUAL)


@triton.jit(do_not_specialize=["rows", "carrier"])
def sum_words_kernel(
    opened,
    words,
    scales,
    offsets,
    bias,
    residual,
    experts,
    members,
    shares,
    listed,
    out,
    rows,
    outputs,
    inputs,
    blocks,
    groups,
    carrier,
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
    HELD: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute HELD outputs of ROWS rows from weights of few bits: grid (tiles of outputs, tiles of
    rows).
    """
    TILES: tl.constexpr = HELD // 16
    WARPS: tl.constexpr = ALONG * TILES
    kind: tl.constexpr = opened.dtype.element_ty
    first, start = tl.program_id(1) * ROWS, tl.program_id(0) * HELD
    n = start + tl.arange(0, HELD)
    of_words = tl.minimum(start + places_of_words(WARPS, TILES), outputs - 1)
    of_scales = tl.minimum(start + places_of_scales(WARPS, TILES), outputs - 1)
    of_x = tl.minimum(first + rows_of_lanes(WARPS), rows - 1)
    wait_for_last_kernel(DEPENDENT)
    total = tl.zeros([HELD, ROWS], tl.float32)
    for _ in tl.range(0, tl.load(listed), num_stages=1):
        mine = tl.load(members)
        if ((mine >> first) & ((1 << ROWS) - 1)) != 0:
            above = tl.load(experts) * outputs
            r = rows_of_expert(mine, rows, first, ROWS)
            sums = sums_of_blocks(
                opened, words, scales, offsets,
                above + of_words, above + of_scales, of_x, inputs, blocks, groups, carrier,
                TILES, ALONG, SETS, UNITS, PARTS, PER_GROUP, JOINED, ADDED, OFFSETS, WHOLE, EVEN,
                False,
            )  # fmt: skip
            m = above + tl.minimum(n, outputs - 1)
            total = weighed(total, sums, bias, shares, m, r, rows, kind, BIAS)
        # the next of the list
        experts, members = experts + 1, members + 1
        shares, opened = shares + rows, opened + rows * inputs
    r = first + tl.arange(0, ROWS)
    store_summed(total, residual, out, n, r, rows, outputs, kind, RESIDUAL)
