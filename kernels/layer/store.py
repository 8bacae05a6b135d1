"""Store a decode step's new tokens: K and V into the bank, the queries before RoPE into the
selector's ring.

One launch per layer replaces the six of three indexed assignments and their index arithmetic. At a
step of a few milliseconds launches are what is left to save (32 layers x 5 launches x about 2 us).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.launch.dispatch import choose
from kernels.launch.shapes import power_of_two
from kernels.launch.triton import tl, triton
from kernels.rows.forms import stored, stored_keys
from kernels.rows.tiles import store_row, transform_of


def store_step_ref(
    k: torch.Tensor,
    v: torch.Tensor,
    q_pre_rope: torch.Tensor,
    bank_k: torch.Tensor,
    bank_v: torch.Tensor,
    ring: torch.Tensor,
    positions: torch.Tensor,
    twice: tuple[int, int] | None = None,
) -> None:
    """Reference of `store_step`, same arguments: indexed assignments."""
    k, v = stored_keys(k, bank_k, "reference"), stored(v, bank_v, "reference")
    rows = torch.arange(positions.shape[0], device=positions.device).unsqueeze(1)
    for at in _rows(positions, twice):
        bank_k.transpose(1, 2)[rows, at] = k
        bank_v.transpose(1, 2)[rows, at] = v
    ring[rows, positions % ring.shape[1]] = q_pre_rope


def _rows(positions: torch.Tensor, twice: tuple[int, int] | None) -> tuple[torch.Tensor, ...]:
    """The rows of K and V that every position is stored to: one, or two."""
    if twice is None:
        return (positions,)
    first, count = twice
    at = positions % count + first
    return at, at + count


def _runs(position: int, count: int, twice: tuple[int, int] | None) -> Iterator[tuple[int, slice]]:
    """Yield (first row of the bank, which of the new rows) of every run of rows that `count` new
    tokens from `position` on are stored to.
    """
    if twice is None:
        yield position, slice(0, count)
        return
    first, size = twice
    at = position % size
    for start in (first + at, first + size + at):
        yield start, slice(0, min(count, size - at))
    for start in (first, first + size) if at + count > size else ():
        yield start, slice(size - at, count)


def store_step_cpu(
    k: torch.Tensor,
    v: torch.Tensor,
    q_pre_rope: torch.Tensor,
    bank_k: torch.Tensor,
    bank_v: torch.Tensor,
    ring: torch.Tensor,
    positions: torch.Tensor,
    twice: tuple[int, int] | None = None,
    backend: str = "cpu",
) -> None:
    """`store_step` on CPU tensors, same arguments: slice copies, as positions are consecutive.
    backend: that rounds packed rows.
    """
    k, v = stored_keys(k, bank_k, backend), stored(v, bank_v, backend)
    for b, position in enumerate(positions[:, 0].tolist()):
        for start, new in _runs(position, k.shape[1], twice):
            at = slice(start, start + new.stop - new.start)
            bank_k[b, :, at] = k[b, new].transpose(0, 1)
            bank_v[b, :, at] = v[b, new].transpose(0, 1)
    if len(positions) == 1:
        ring.index_copy_(1, positions[0] % ring.shape[1], q_pre_rope)
        return
    rows = torch.arange(len(positions)).unsqueeze(1)
    ring[rows, positions % ring.shape[1]] = q_pre_rope


def store_step(
    k: torch.Tensor,
    v: torch.Tensor,
    q_pre_rope: torch.Tensor,
    bank_k: torch.Tensor,
    bank_v: torch.Tensor,
    ring: torch.Tensor,
    positions: torch.Tensor,
    twice: tuple[int, int] | None = None,
    backend: str = "auto",
) -> None:
    """Write k[b, j] and v[b, j] to row positions[b, j] of the bank, and q_pre_rope[b, j] to slot
    positions[b, j] % R of the ring.

    twice (first, count): the bank's rows hold a ring of their own, twice. Position p then goes to
    rows first + p % count and first + count + p % count, with count >= Q.

    k, v [B, Q, Hkv, D] and q_pre_rope [B, Q, H, D]: views with a contiguous last dim; bank_k,
    bank_v [B, Hkv, T, D] views of any strides, last dim contiguous, or packed rows
    (kernels/rows/int8.py), into which k and v are rounded; ring [B, R, H, D] contiguous,
    R >= Q; positions [B, Q] int64, below T, consecutive in each sequence. All floats
    share one dtype. Mutates bank_k, bank_v and ring. On a GPU no position visits the host. Raises
    ValueError for an unknown backend.
    """
    given, chosen = (k, v, q_pre_rope, bank_k, bank_v, ring, positions, twice), choose(backend, k)
    if chosen == "triton":
        store_step_triton(*given)
    elif chosen == "cpu":
        store_step_cpu(*given, backend)
    else:
        store_step_ref(*given)


@triton.jit
def store_kernel(
    k,
    v,
    q_pre_rope,
    bank_k,
    bank_v,
    ring,
    positions,
    queries,
    slots,
    skb,
    skq,
    skh,
    svb,
    svq,
    svh,
    srb,
    srq,
    srh,
    tkb,
    tkh,
    tkt,
    tvb,
    tvh,
    tvt,
    tr,
    first,
    count,
    HKV: tl.constexpr,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    B: tl.constexpr,
    FACTOR: tl.constexpr,
    ODD: tl.constexpr,
    TWICE: tl.constexpr,
):
    """Store one head of one new token: grid (B * Q, 2 * HKV + H), heads of K, of V, then of Q."""
    b = (tl.program_id(0) // queries).to(tl.int64)
    j = tl.program_id(0) % queries
    head = tl.program_id(1)
    at = tl.load(positions + tl.program_id(0))
    place = at
    if TWICE:
        place = first + at % count
    h = tl.arange(0, HP)
    if head < HKV:
        row = k + b * skb + j * skq + head * skh
        first_half = tl.load(row + h, mask=h < HALF, other=0.0)
        second_half = tl.load(row + HALF + h, mask=h < HALF - ODD, other=0.0)
        to = bank_k + b * tkb + head * tkh.to(tl.int64) + place * tkt
        store_row(to, first_half, second_half, h, HALF, B, FACTOR, ODD)
        if TWICE:
            store_row(
                to + count.to(tl.int64) * tkt, first_half, second_half, h, HALF, B, FACTOR, ODD
            )
    elif head < 2 * HKV:
        head -= HKV
        row = v + b * svb + j * svq + head * svh
        first_half = tl.load(row + h, mask=h < HALF, other=0.0)
        second_half = tl.load(row + HALF + h, mask=h < HALF - ODD, other=0.0)
        to = bank_v + b * tvb + head * tvh.to(tl.int64) + place * tvt
        store_row(to, first_half, second_half, h, HALF, B, FACTOR, ODD, True)
        if TWICE:
            again = to + count.to(tl.int64) * tvt
            store_row(again, first_half, second_half, h, HALF, B, FACTOR, ODD, True)
    else:
        head -= 2 * HKV
        row = q_pre_rope + b * srb + j * srq + head * srh
        first_half = tl.load(row + h, mask=h < HALF, other=0.0)
        second_half = tl.load(row + HALF + h, mask=h < HALF - ODD, other=0.0)
        slot = ring + (b * slots + at % slots) * tr + head * (2 * HALF - ODD)
        store_row(slot, first_half, second_half, h, HALF, 0, 1, ODD)


def store_step_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    q_pre_rope: torch.Tensor,
    bank_k: torch.Tensor,
    bank_v: torch.Tensor,
    ring: torch.Tensor,
    positions: torch.Tensor,
    twice: tuple[int, int] | None = None,
) -> None:
    """`store_step` by the Triton kernel of this file, same arguments. Bytes: the new rows, read
    once and written once or twice.
    """
    batch, queries, kv_heads, dim = k.shape
    slots, heads = ring.shape[1], ring.shape[2]
    store_kernel[(batch * queries, 2 * kv_heads + heads)](
        k,
        v,
        q_pre_rope,
        bank_k,
        bank_v,
        ring,
        positions.contiguous(),
        queries,
        slots,
        *k.stride()[:3],
        *v.stride()[:3],
        *q_pre_rope.stride()[:3],
        *bank_k.stride()[:3],
        *bank_v.stride()[:3],
        heads * dim,
        *(twice or (0, 0)),
        HKV=kv_heads,
        HALF=-(-dim // 2),
        HP=power_of_two(-(-dim // 2)),
        **transform_of(dim),
        ODD=dim % 2,
        TWICE=twice is not None,
        num_warps=1,
    )
