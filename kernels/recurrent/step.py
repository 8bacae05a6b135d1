"""A decode step of a gated delta net between its products: convolution, gates, delta rule and gated
norm, on a GPU in one launch.

    net_step(projected, rates, weights, held, base, positions, eps, backend) -> y

One program has one value head. It reads S once, into registers, and before it waits for the kernel
in front of it: no kernel of a step writes S. Each token's key, delta and decay then join the tail's
rows in registers, so a token is computed as it would be if the ones before it had come in a step of
their own: its bits do not depend on how many tokens share the step. Of the heads that share a key
head, each computes q and k, and the first writes the rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.launch.dispatch import choose
from kernels.launch.pdl import dependent, wait_for_last_kernel
from kernels.launch.shapes import power_of_two
from kernels.launch.triton import tl, triton
from kernels.recurrent.conv import conv_step
from kernels.recurrent.delta import EPS, Tail, gated_delta_step
from kernels.recurrent.gates import gated_norm, gates

MOST_DIM = 128  # of a key or a value head: S of one head is 64 KB then, the registers of a program


class NetWeights(NamedTuple):
    """The small weights of a layer: the convolution's [C, K], the gates' decay and bias [Hv], the
    norm's [dv]. C: q and k of all key heads, then v of all value heads.
    """

    conv: torch.Tensor
    decay: torch.Tensor
    bias: torch.Tensor
    norm: torch.Tensor


class Held(NamedTuple):
    """What one layer holds of B sequences, as kernels/recurrent/conv.py and delta.py have it: S
    float32 [B, Hv, dk, dv], the convolution's newest inputs [B, T, C] in the model's dtype, and the
    tail. Position p lies in row p % T.
    """

    state: torch.Tensor
    inputs: torch.Tensor
    tail: Tail


def net_step(
    projected: torch.Tensor,
    rates: torch.Tensor,
    weights: NetWeights,
    held: Held,
    base: torch.Tensor,
    positions: torch.Tensor,
    eps: float,
    backend: str = "auto",
) -> torch.Tensor:
    """Run the Q tokens (1 to 8) at `positions` int64 [B, Q], which follow each other: y
    [B, Q, Hv, dv] in the dtype of projected.

    projected [B, Q, C + Hv * dv]: q, k, v, then z; rates [B, Q, 2 * Hv]: beta's, then the decay's.
    base int64 [B]: tokens that S stands after. Their rows are written into the rings of `held`,
    and nothing else is. eps: beside the mean square of a head. No index visits the host.
    """
    given = projected, rates, weights, held, base, positions, eps
    if choose(backend, projected) == "triton" and max(held.state.shape[2:]) <= MOST_DIM:
        return net_step_triton(*given)
    return net_step_ref(*given, backend)


def net_step_ref(
    projected: torch.Tensor,
    rates: torch.Tensor,
    weights: NetWeights,
    held: Held,
    base: torch.Tensor,
    positions: torch.Tensor,
    eps: float,
    backend: str = "reference",
) -> torch.Tensor:
    """Reference of `net_step`, same arguments: its parts, one after the other."""
    (heads, dk, dv), keys = held.state.shape[1:], held.tail.keys.shape[1]
    mixed, z = projected.split([held.inputs.shape[2], heads * dv], -1)
    mixed = conv_step(mixed, held.inputs, positions, weights.conv, backend)
    q, k, v = mixed.split([keys * dk, keys * dk, heads * dv], -1)
    q, k, v, z = (t.unflatten(-1, (-1, d)) for t, d in ((q, dk), (k, dk), (v, dv), (z, dv)))
    g, beta = gates(rates, weights.decay, weights.bias)
    where = held.state, held.tail, base, positions
    out = gated_delta_step(q, k, v, g, beta, *where, backend)
    return gated_norm(out, z, weights.norm, eps, backend)


def net_step_triton(
    projected: torch.Tensor,
    rates: torch.Tensor,
    weights: NetWeights,
    held: Held,
    base: torch.Tensor,
    positions: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """`net_step` by the Triton kernel of this file, same arguments."""
    (batch, heads, dk, dv), tail = held.state.shape, held.tail
    count, key_heads, taps = positions.shape[1], tail.keys.shape[1], weights.conv.shape[1]
    assert projected.stride(2) == rates.stride(2) == 1, "a token's values lie together"
    assert all(t.is_contiguous() for t in (held.state, held.inputs, *tail, *weights))
    out = projected.new_empty(batch, count, heads, dv)
    staged = projected.new_empty(batch, count, heads, 2 * dk + dv, dtype=torch.float32)
    net_step_kernel[(heads, batch)](
        projected, rates, *weights, held.state, held.inputs, *tail, base, positions, staged, out,
        count, key_heads, heads // key_heads,
        *projected.stride()[:2], *rates.stride()[:2], positions.stride(0), eps, EPS,
        dk=dk, dv=dv, DK=max(16, power_of_two(dk)), DV=max(16, power_of_two(dv)),
        TAPS=taps, INPUTS=held.inputs.shape[1],
        ROWS=tail.keys.shape[2], TAIL=power_of_two(tail.keys.shape[2]),
        num_warps=8, **dependent(projected),
    )  # fmt: skip
    return out


@triton.jit
def taps_of(conv, c, inside, TAPS: tl.constexpr):
    """Load the convolution's weights of channels c, each tap's a vector."""
    taps = ()
    for tap in tl.static_range(TAPS):
        one = tl.load(conv + c * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
        taps = taps + (one,)  # type: ignore[assignment]
    return taps


@triton.jit
def convolved(
    x,
    ring,
    taps,
    c,
    inside,
    i,
    first,
    row,
    channels,
    TAPS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Convolve channels c of token i of a step whose first stands at position `first`, with silu:
    (its input, its output), both in the model's dtype. The inputs before the step's are in the
    ring.
    """
    kind = x.dtype.element_ty
    mine = tl.load(x + i * row + c, mask=inside, other=0.0)
    total = mine.to(tl.float32) * taps[TAPS - 1]
    for tap in tl.static_range(TAPS - 1):
        back = i - (TAPS - 1) + tap
        place = first + back
        new = tl.load(x + back * row + c, mask=inside & (back >= 0), other=0.0)
        at = ring + place % INPUTS * channels + c
        old = tl.load(at, mask=inside & (back < 0) & (place >= 0), other=0.0)
        total += tl.where(back >= 0, new, old).to(tl.float32) * taps[tap]
    total = total.to(kind).to(tl.float32)
    return mine, (total / (1.0 + tl.exp(-total))).to(kind)


@triton.jit
def gates_of(a, b, decay, bias, kind: tl.constexpr):
    """(g, beta) of one head: `gates` of kernels/recurrent/gates.py."""
    a = a.to(tl.float32) + bias.to(tl.float32)
    grown = tl.exp(tl.minimum(a, 20.0))
    # log(1 + x) by Kahan's correction: 1 + x loses digits of a small x
    more = 1.0 + grown
    small = tl.where(
        more == 1.0, grown, tl.log(more) * (grown / tl.where(more == 1.0, 1.0, more - 1.0))
    )
    g = -tl.exp(decay.to(tl.float32)) * tl.where(a > 20.0, a, small)
    beta = (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(kind).to(tl.float32)
    return g, beta


@triton.jit(do_not_specialize=["count", "key_heads", "group"])
def net_step_kernel(
    projected,
    rates,
    conv,
    decay,
    bias,
    norm,
    state,
    inputs,
    keys,
    deltas,
    decays,
    base,
    positions,
    staged,
    out,
    count,
    key_heads,
    group,
    p_batch,
    p_row,
    r_batch,
    r_row,
    positions_batch,
    eps,
    unit_eps,
    dk: tl.constexpr,
    dv: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    TAPS: tl.constexpr,
    INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    TAIL: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Run the tokens of a step through one value head: grid (value heads, sequences).

    S and the weights are loaded before the kernel waits: no kernel of a step writes them.
    """
    kind = out.dtype.element_ty
    head, b, heads = tl.program_id(0), tl.program_id(1).to(tl.int64), key_heads * group
    key_head = head // group
    x, y, t = tl.arange(0, DK), tl.arange(0, DV), tl.arange(0, TAIL)
    in_k, in_v = x < dk, y < dv
    both = in_k[:, None] & in_v[None, :]
    of_head = b * heads + head
    s = tl.load(state + (of_head * dk + x[:, None]) * dv + y[None, :], mask=both, other=0.0)
    q_at, v_at = key_head * dk + x, 2 * key_heads * dk + head * dv + y
    k_at = key_heads * dk + q_at
    q_taps = taps_of(conv, q_at, in_k, TAPS)
    k_taps = taps_of(conv, k_at, in_k, TAPS)
    v_taps = taps_of(conv, v_at, in_v, TAPS)
    scale = tl.load(norm + y, mask=in_v, other=0.0)
    log_rate, shift = tl.load(decay + head), tl.load(bias + head)
    wait_for_last_kernel(DEPENDENT)
    channels = (2 * key_heads * dk + heads * dv).to(tl.int64)
    first, held = tl.load(positions + b * positions_batch), tl.load(base + b)
    order = (t + ROWS - held % ROWS) % ROWS
    live = (t < ROWS) & (order < first - held)
    k_rows = keys + (b * key_heads + key_head) * ROWS * dk
    v_rows = deltas + of_head * ROWS * dv
    near = tl.load(
        k_rows + t[:, None] * dk + x[None, :], mask=live[:, None] & in_k[None, :], other=0.0
    )
    had = tl.load(
        v_rows + t[:, None] * dv + y[None, :], mask=live[:, None] & in_v[None, :], other=0.0
    )
    logs = tl.load(decays + of_head * ROWS + t, mask=live, other=0.0)
    later = order[None, :] > order[:, None]  # row s came after row t
    inputs += b * INPUTS * channels
    projected += b * p_batch
    rates += b * r_batch
    # what comes after needs q, k and v in other registers than the convolution: through memory,
    # where they stay in the L1, the compiler does not compute them once in each of those
    staged += (b * count * heads + head) * (2 * dk + dv)
    for i in range(count):
        q_in, q = convolved(
            projected, inputs, q_taps, q_at, in_k, i, first, p_row, channels, TAPS, INPUTS
        )
        k_in, k = convolved(
            projected, inputs, k_taps, k_at, in_k, i, first, p_row, channels, TAPS, INPUTS
        )
        v_in, v = convolved(
            projected, inputs, v_taps, v_at, in_v, i, first, p_row, channels, TAPS, INPUTS
        )
        q, k = q.to(tl.float32), k.to(tl.float32)
        q = q * tl.rsqrt(tl.sum(q * q, 0) + unit_eps) * dk**-0.5
        k = k * tl.rsqrt(tl.sum(k * k, 0) + unit_eps)
        mine = staged + i * heads * (2 * dk + dv)
        tl.store(mine + x, q, mask=in_k)
        tl.store(mine + dk + x, k, mask=in_k)
        tl.store(mine + 2 * dk + y, v.to(tl.float32), mask=in_v)
        ring = inputs + (first + i) % INPUTS * channels
        tl.store(ring + v_at, v_in, mask=in_v)
        ours = in_k & (head % group == 0)
        tl.store(ring + q_at, q_in, mask=ours)
        tl.store(ring + k_at, k_in, mask=ours)
        tl.store(k_rows + (first + i) % ROWS * dk + x, k, mask=ours)
    tl.debug_barrier()
    for i in range(count):
        mine = staged + i * heads * (2 * dk + dv)
        q = tl.load(mine + x, mask=in_k, other=0.0)
        k = tl.load(mine + dk + x, mask=in_k, other=0.0)
        v = tl.load(mine + 2 * dk + y, mask=in_v, other=0.0)
        rate = tl.load(rates + i * r_row + head)
        g, beta = gates_of(tl.load(rates + i * r_row + heads + head), rate, log_rate, shift, kind)
        passed = tl.exp(tl.sum(logs, 0) + g)
        since = tl.exp(tl.sum(tl.where(later, logs[None, :], 0.0), 1) + g)
        seen = tl.sum(s * k[:, None], 0) * passed
        seen += tl.sum(had * (since * tl.sum(near * k[None, :], 1))[:, None], 0)
        asked = tl.sum(s * q[:, None], 0) * passed
        asked += tl.sum(had * (since * tl.sum(near * q[None, :], 1))[:, None], 0)
        delta = (v - seen) * beta
        o = asked + delta * tl.sum(q * k, 0)
        slot = (first + i) % ROWS
        here = t == slot
        near = tl.where(here[:, None], k[None, :], near)
        had = tl.where(here[:, None], delta[None, :], had)
        logs = tl.where(here, g, logs)
        tl.store(v_rows + slot * dv + y, delta, mask=in_v)
        tl.store(decays + of_head * ROWS + slot, g)
        z = tl.load(projected + i * p_row + channels + head * dv + y, mask=in_v, other=0.0)
        z = z.to(tl.float32)
        o = o.to(kind).to(tl.float32)
        o = (o * tl.rsqrt(tl.sum(o * o, 0) / dv + eps)).to(kind).to(tl.float32)
        # a weight of the model's dtype rounds the product, one of float32 does not
        o = (o * scale.to(tl.float32)).to(scale.dtype).to(tl.float32)
        o = (o * (z / (1.0 + tl.exp(-z)))).to(kind)
        tl.store(out + ((b * count + i) * heads + head) * dv + y, o, mask=in_v)
