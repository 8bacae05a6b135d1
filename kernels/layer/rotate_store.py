"""Rotate a decode step's queries and keys, and put K and V into the bank and the queries before
rotation into the selector's ring: one launch where there were two.
"""

from __future__ import annotations

import torch

from kernels.launch.pdl import dependent, wait_for_last_kernel
from kernels.launch.shapes import power_of_two
from kernels.launch.triton import tl, triton
from kernels.layer.store import store_step_ref
from kernels.rows.tiles import store_row, transform_of


def rotate_store_ref(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    bank_k: torch.Tensor,
    bank_v: torch.Tensor,
    ring: torch.Tensor,
    positions: torch.Tensor,
    twice: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Reference of `rotate_store`, same arguments."""
    heads, kv_heads = ring.shape[2], bank_k.shape[1]
    q, _, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
    first, second = qkv[:, :, : heads + kv_heads].float().chunk(2, dim=-1)
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(qkv.dtype)
    store_step_ref(turned[:, :, heads:], v, q, bank_k, bank_v, ring, positions, twice)
    return turned[:, :, :heads].contiguous()


def rotate_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    bank_k: torch.Tensor,
    bank_v: torch.Tensor,
    ring: torch.Tensor,
    positions: torch.Tensor,
    twice: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Rotate the pairs (i, i + D/2) of q and k and store the step, by the Triton kernel of this
    file.

    qkv [B, Q, H + 2 Hkv, D] contiguous; cos, sin float32 [B, Q, D/2] contiguous; the bank's views,
    ring, positions and twice as in kernels/layer/store.py. Returns rotated q [B, Q, H, D], new.
    Mutates bank_k, bank_v and ring.
    """
    batch, queries, _, dim = qkv.shape
    kv_heads, slots, heads = bank_k.shape[1], ring.shape[1], ring.shape[2]
    out = torch.empty(batch, queries, heads, dim, dtype=qkv.dtype, device=qkv.device)
    rotate_store_kernel[(batch * queries, heads + 2 * kv_heads)](
        qkv,
        cos,
        sin,
        out,
        bank_k,
        bank_v,
        ring,
        positions.contiguous(),
        queries,
        slots,
        *bank_k.stride()[:3],
        *bank_v.stride()[:3],
        *(twice or (0, 0)),
        H=heads,
        HKV=kv_heads,
        HALF=dim // 2,
        HP=power_of_two(dim // 2),
        **transform_of(dim),
        TWICE=twice is not None,
        num_warps=1,
        **dependent(qkv),
    )
    return out


@triton.jit
def rotate_store_kernel(
    qkv,
    cos,
    sin,
    out,
    bank_k,
    bank_v,
    ring,
    positions,
    queries,
    slots,
    tkb,
    tkh,
    tkt,
    tvb,
    tvh,
    tvt,
    first_row,
    count,
    H: tl.constexpr,
    HKV: tl.constexpr,
    HALF: tl.constexpr,
    HP: tl.constexpr,
    B: tl.constexpr,
    FACTOR: tl.constexpr,
    TWICE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Take one head of one new token: grid (B * Q, H + 2 * HKV), heads of Q, of K, then of V."""
    wait_for_last_kernel(DEPENDENT)
    token = tl.program_id(0)
    head = tl.program_id(1)
    b = (token // queries).to(tl.int64)
    at = tl.load(positions + token)
    place = at
    if TWICE:
        place = first_row + at % count
    h = tl.arange(0, HP)
    row = qkv + (token.to(tl.int64) * (H + 2 * HKV) + head) * 2 * HALF
    first = tl.load(row + h, mask=h < HALF, other=0.0)
    second = tl.load(row + HALF + h, mask=h < HALF, other=0.0)
    if head >= H + HKV:
        to = bank_v + b * tvb + (head - H - HKV) * tvh.to(tl.int64) + place * tvt
        store_row(to, first, second, h, HALF, B, FACTOR, 0, True)
        if TWICE:
            again = to + count.to(tl.int64) * tvt
            store_row(again, first, second, h, HALF, B, FACTOR, 0, True)
    else:
        c = tl.load(cos + token * HALF + h, mask=h < HALF, other=0.0)
        s = tl.load(sin + token * HALF + h, mask=h < HALF, other=0.0)
        low = first.to(tl.float32) * c - second.to(tl.float32) * s
        high = second.to(tl.float32) * c + first.to(tl.float32) * s
        low, high = low.to(out.dtype.element_ty), high.to(out.dtype.element_ty)
        if head < H:
            turned = out + (token.to(tl.int64) * H + head) * 2 * HALF
            store_row(turned, low, high, h, HALF, 0, 1)
            slot = ring + ((b * slots + at % slots) * H + head) * 2 * HALF
            store_row(slot, first, second, h, HALF, 0, 1)
        else:
            to = bank_k + b * tkb + (head - H) * tkh.to(tl.int64) + place * tkt
            store_row(to, low, high, h, HALF, B, FACTOR)
            if TWICE:
                store_row(to + count.to(tl.int64) * tkt, low, high, h, HALF, B, FACTOR)
