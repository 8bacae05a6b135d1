"""The choice of experts for the rows of a decode step, from the router's logits to a list that the
products read, without a visit to the host.

The list names each chosen expert once, ascending, with the rows that chose it. Its length is a
number on the device; its room is as large as it can get.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.launch.pdl import dependent, wait_for_last_kernel
from kernels.launch.radix import ordered
from kernels.launch.shapes import power_of_two
from kernels.launch.triton import tl, triton
from kernels.layer.gemv import MOST_ROWS, rows_of

MOST_EXPERTS = 512  # 16 rows of so many keys are 64 registers of a thread
MANY = 256  # from here on twice the warps


class Choice(NamedTuple):
    """What R rows chose: room for D = min(experts, R * per_token) of them.

    experts: int32 [D], ascending. members: int32 [D], bit r where row r chose the expert. shares:
    float32 [D, R], the weight of an expert in a row, 0 where it did not choose it. listed: int32
    [1], how many there are; what lies beyond is not written.
    """

    experts: torch.Tensor
    members: torch.Tensor
    shares: torch.Tensor
    listed: torch.Tensor


def best_experts(
    logits: torch.Tensor,
    per_token: int,
    normalise: bool,
    correction: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose per row of logits [T, E], by torch's operators: (shares float32, ids int64), both
    [T, per_token], the best first.

    The softmax runs in float32. normalise: over the chosen alone, so that they sum to one. Equal
    logits go to the lower id, but on a CPU, where torch.topk takes a third of a stable sort's time.
    correction [E]: sigmoids take the softmax's place, and the best are those of sigmoid plus
    correction; the correction chooses alone and is in no share (DeepSeek-V3, arXiv 2412.19437,
    equation 16).
    """
    if correction is not None:
        sigmoids = logits.float().sigmoid()
        _, ids = best_experts(sigmoids + correction.float(), per_token, True)
        shares = sigmoids.gather(1, ids)
        return shares / shares.sum(-1, keepdim=True) if normalise else shares, ids
    if logits.device.type == "cpu":
        kept, ids = torch.topk(logits, per_token, dim=-1)
    else:
        kept, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        kept, ids = kept[:, :per_token], ids[:, :per_token]
    if normalise:  # the same as the softmax of all, made to sum to one
        return torch.softmax(kept, dim=-1, dtype=torch.float32), ids
    return torch.softmax(logits, dim=-1, dtype=torch.float32).gather(1, ids), ids


def choose_experts_ref(
    logits: torch.Tensor,
    per_token: int,
    normalise: bool,
    correction: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> Choice:
    """Reference of `choose_experts`, same arguments; logits in float64 give shares in float64."""
    rows, count = logits.shape
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    ranks = logits if correction is None else wide.sigmoid() + correction
    ids = torch.sort(ranks, dim=-1, descending=True, stable=True).indices[:, :per_token]
    taken = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    if correction is None:
        over = wide.masked_fill(~taken, float("-inf")) if normalise else wide
        shares = torch.softmax(over, -1)
    else:
        shares = torch.where(taken, wide.sigmoid(), 0)
        shares = shares / shares.sum(-1, keepdim=True) if normalise else shares
    if scale is not None:
        shares = shares * scale.to(shares.dtype)
    listed = taken.any(0).nonzero()[:, 0]
    room = min(count, rows * per_token)
    bits = (taken.int() << torch.arange(rows, device=logits.device)[:, None]).sum(0)
    found = Choice(
        torch.zeros(room, dtype=torch.int32, device=logits.device),
        torch.zeros(room, dtype=torch.int32, device=logits.device),
        torch.zeros(room, rows, dtype=shares.dtype, device=logits.device),
        torch.full((1,), len(listed), dtype=torch.int32, device=logits.device),
    )
    found.experts[: len(listed)] = listed.int()
    found.members[: len(listed)] = bits[listed].int()
    found.shares[: len(listed)] = torch.where(taken, shares, 0).t()[listed]
    return found


def choose_experts(
    logits: torch.Tensor,
    per_token: int,
    normalise: bool,
    correction: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
) -> Choice:
    """Choose `per_token` experts for each row of logits [R, E], contiguous, by the Triton kernel of
    this file.

    At most MOST_ROWS rows and MOST_EXPERTS experts. NaN ranks highest, as torch.topk has it, and
    makes every share of its row NaN; -0 equals +0; equal logits go to the lower id. Shares are the
    float32 softmax of the row, normalise: of its chosen alone. A row's shares do not depend on the
    other rows. correction [E]: as in `best_experts`. scale [E]: of each expert's shares, last.
    Raises ValueError for more rows.
    """
    count, device = logits.shape[1], logits.device
    rows = rows_of(logits, count)
    room, block = min(count, rows * per_token), power_of_two(count)
    found = Choice(
        torch.empty(room, dtype=torch.int32, device=device),
        torch.empty(room, dtype=torch.int32, device=device),
        torch.empty(room, rows, dtype=torch.float32, device=device),
        torch.empty(1, dtype=torch.int32, device=device),
    )
    choose_kernel[(1,)](
        logits,
        logits if correction is None else correction,
        logits if scale is None else scale,
        *found,
        rows,
        count,
        BEST=per_token,
        BLOCK=block,
        ROWS=MOST_ROWS,
        ALL=not normalise,
        SIGMOID=correction is not None,
        SCALED=scale is not None,
        num_warps=8 if block >= MANY else 4,
        **dependent(logits),
    )
    return found


@triton.jit(do_not_specialize=["rows"])
def choose_kernel(
    logits,
    correction,
    scale,
    experts,
    members,
    shares,
    listed,
    rows,
    count,
    BEST: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ALL: tl.constexpr,
    SIGMOID: tl.constexpr,
    SCALED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Choose for all rows: one program. A key is a logit's order and, below it, the expert's place
    from the end: the largest is the best, the lower id among equals, and no two are equal.
    """
    r, e = tl.arange(0, ROWS), tl.arange(0, BLOCK)
    inside = (r < rows)[:, None] & (e < count)[None, :]
    wait_for_last_kernel(DEPENDENT)
    x = tl.load(logits + r[:, None] * count + e[None, :], mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    score = x
    if SIGMOID:
        x = 1.0 / (1.0 + tl.exp(-x))
        more = tl.load(correction + e, mask=e < count, other=0.0).to(tl.float32)
        score = x + more[None, :]
    rank = tl.where(score != score, 0xFFFFFFFF, ordered(score)).to(tl.uint32)
    keys = tl.where(inside, (rank.to(tl.int64) << 16) | (BLOCK - e)[None, :], 0)
    for _ in range(BEST):
        best = tl.max(keys, 1)
        keys = tl.where(keys == best[:, None], 0, keys)
    taken = inside & (keys == 0)
    over = inside if ALL else taken
    if SIGMOID:
        whole = 1.0 if ALL else tl.sum(tl.where(taken, x, 0.0), 1)[:, None]
        share = tl.where(taken, x / whole, 0.0)
    else:
        p = tl.where(over, tl.exp(x - tl.max(x, 1)[:, None]), 0.0)
        share = tl.where(taken, p / tl.sum(p, 1)[:, None], 0.0)
    if SCALED:
        share *= tl.load(scale + e, mask=e < count, other=0.0).to(tl.float32)[None, :]
    bits = tl.sum(tl.where(taken, 1 << r[:, None], 0), 0)
    used = bits != 0
    place = tl.cumsum(used.to(tl.int32), 0) - 1
    tl.store(experts + place, e, mask=used)
    tl.store(members + place, bits, mask=used)
    tl.store(
        shares + place[None, :] * rows + r[:, None],
        share,
        mask=used[None, :] & (r < rows)[:, None],
    )
    tl.store(listed, tl.sum(used.to(tl.int32), 0))
