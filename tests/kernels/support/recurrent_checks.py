"""Check the kernels of a gated delta net: interpreted (tests/kernels) and compiled on a GPU
(tests/cuda).

The oracle is a float64 loop over tokens that shares no code with the kernels. The rule: a kernel's
error is at most twice that of plain torch at the same dtype. Rows of a ring that hold no token are
NaN, so a stray read shows in the result.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from kernels.recurrent.delta import Tail, gated_delta_chunk
from kernels.recurrent.step import Held, NetWeights, net_step
from tests.kernels.support.kernel_checks import assert_close, worst

RING, EPS, UNIT = 32, 1e-6, 1e-6
# Orders of summation in which plain torch is tried. A delta of equal keys is a difference of nearly
# equal numbers: one order's error lies anywhere in a range of three to one.
TURNS = 16
HOSTILE = ("plain", "kept", "forgotten", "mixed", "zero keys", "same keys", "long decay")


class Shape(NamedTuple):
    """Key heads, value heads of each, their dimensions, taps."""

    keys: int
    group: int
    dk: int
    dv: int
    taps: int = 4

    @property
    def heads(self) -> int:
        """Value heads."""
        return self.keys * self.group

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return 2 * self.keys * self.dk + self.heads * self.dv


def normal(seed: int, *shape: int) -> torch.Tensor:
    """Make a tensor of normal values, the same on every device."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def hostile(g: torch.Tensor, beta: torch.Tensor, k: torch.Tensor, kind: str) -> None:
    """Change gates [B, N, Hv] and keys [B, N, Hk, dk] in place: decays near 1 ("kept") and near 0
    ("forgotten"), both in turn, keys of length 0, equal keys that nothing forgets, and small decays
    that add up.
    """
    if kind in ("kept", "same keys"):
        g.mul_(1e-6)
        beta.copy_(1 - beta * 1e-3)
    elif kind == "forgotten":
        g.sub_(30)
    elif kind == "mixed":
        g[:, ::3] *= 1e-5
        g[:, 1::3] -= 25
        beta[:, ::2] *= 1e-4
    elif kind == "long decay":
        g.mul_(0.02)
    if kind == "zero keys":
        k[:, ::2] = 0
    elif kind == "same keys":
        k.copy_(k[:, :1].clone().expand_as(k))


def rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The gated delta rule in float64: (o, d, [S before, after each token])."""
    q, k, v, g, beta, state = (t.double() for t in (q, k, v, g, beta, state))
    group = v.shape[2] // k.shape[2]
    q, k = (t / (t.square().sum(-1, keepdim=True) + UNIT).sqrt() for t in (q, k))
    q = q / q.shape[-1] ** 0.5
    out, deltas, states = [], [], [state]
    for i in range(q.shape[1]):
        query, key = (t[:, i].repeat_interleave(group, 1) for t in (q, k))
        state = state * g[:, i].exp()[..., None, None]
        read = torch.einsum("bhkv,bhk->bhv", state, key)
        deltas.append((v[:, i] - read) * beta[:, i, :, None])
        state = state + torch.einsum("bhk,bhv->bhkv", key, deltas[-1])
        out.append(torch.einsum("bhkv,bhk->bhv", state, query))
        states.append(state)
    return torch.stack(out, 1), torch.stack(deltas, 1), states


class Net:
    """The tokens, weights and state of a layer of B sequences; `kind`: of HOSTILE."""

    def __init__(
        self, shape: Shape, count: int, dtype: torch.dtype, device: str, kind: str, batch: int = 2
    ) -> None:
        self.shape, self.dtype, self.device, self.count = shape, dtype, device, count
        heads, dk, dv, channels = shape.heads, shape.dk, shape.dv, shape.channels
        x = normal(1, batch, count, channels + heads * dv)
        rates = normal(2, batch, count, 2 * heads)
        decay = normal(3, heads) * 0.5
        bias = normal(4, heads)
        if kind in ("kept", "same keys"):
            rates[..., :heads] += 8
            rates[..., heads:] -= 12
        elif kind == "forgotten":
            rates[..., heads:] += 30
        elif kind == "mixed":
            rates[:, ::3, heads:] -= 20
            rates[:, 1::3, heads:] += 25
            rates[:, ::2, :heads] -= 9
        elif kind == "long decay":
            rates[..., heads:] -= 4
        if kind == "zero keys":
            x[..., shape.keys * dk : 2 * shape.keys * dk] = 0
        elif kind == "same keys":
            x[..., : 2 * shape.keys * dk] = x[:, :1, : 2 * shape.keys * dk]
        conv = normal(5, channels, shape.taps) * shape.taps**-0.5
        norm = 1 + normal(6, dv) * 0.2
        self.state = normal(7, batch, heads, dk, dv).to(device)
        self.x, self.rates = x.to(device, dtype), rates.to(device, dtype)
        self.weights = NetWeights(*(t.to(device, dtype) for t in (conv, decay, bias, norm)))

    def held(self, empty: float = torch.nan) -> Held:
        """A state without a token since; empty: what rows without a token hold."""
        batch, (keys, _, dk, dv, _) = len(self.x), self.shape
        sizes = (batch, keys, RING, dk), (batch, self.shape.heads, RING, dv)
        rows = [torch.full(size, empty, device=self.device) for size in sizes]
        logs = torch.full(sizes[1][:3], empty, device=self.device)
        inputs = torch.full((batch, RING, self.shape.channels), empty, device=self.device)
        return Held(self.state.clone(), inputs.to(self.dtype), Tail(*rows, logs))

    def run(self, held: Held, first: int, widths: list[int], backend: str) -> torch.Tensor:
        """Run steps of so many tokens, from token 0 at position `first` on: y [B, N, Hv, dv].
        S stands after `first` tokens.
        """
        base = torch.full((len(self.x),), first, device=self.device)
        out, at = [], 0
        for width in widths:
            positions = torch.arange(first + at, first + at + width, device=self.device)
            part, where = slice(at, at + width), (base, positions.expand(len(self.x), -1))
            given = self.x[:, part], self.rates[:, part], self.weights, held, *where, EPS
            out.append(net_step(*given, backend))
            at += width
        return torch.cat(out, 1)

    def oracle(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(y, d) in float64, from position 0 on: rounded nowhere."""
        (keys, _, dk, dv, taps), heads, x = self.shape, self.shape.heads, self.x.double()
        conv, decay, bias, norm = (t.double() for t in self.weights)
        mixed = torch.zeros_like(x[..., : self.shape.channels])
        for i in range(self.count):
            for tap in range(taps):
                if i - taps + 1 + tap >= 0:
                    mixed[:, i] += x[:, i - taps + 1 + tap, : self.shape.channels] * conv[:, tap]
        mixed = mixed * mixed.sigmoid()
        q, k, v = mixed.split([keys * dk, keys * dk, heads * dv], -1)
        q, k, v = (t.unflatten(-1, (-1, d)) for t, d in ((q, dk), (k, dk), (v, dv)))
        b, a = self.rates.double().chunk(2, -1)
        g = -decay.exp() * torch.log1p((a + bias).exp())
        out, deltas, _ = rule(q, k, v, g, b.sigmoid(), self.state)
        z = x[..., self.shape.channels :].unflatten(-1, (-1, dv))
        out = out / (out.square().mean(-1, keepdim=True) + EPS).sqrt() * norm
        return out * z * z.sigmoid(), deltas


def check_step(
    device: str,
    shape: Shape,
    dtype: torch.dtype,
    kind: str,
    widths: tuple[int, ...] = (1, 3, 8, 2, 1),
) -> None:
    """Compare steps of several widths with the oracle and with plain torch, and what they leave in
    the rings.
    """
    net = Net(shape, sum(widths), dtype, device, kind)
    exact, deltas = net.oracle()
    mine, plain = net.held(), net.held(0.0)  # plain torch multiplies such rows by 0
    found = net.run(mine, 0, list(widths), "triton")
    wanted = net.run(plain, 0, list(widths), "cpu")
    what = f"{kind} {shape} {dtype}"
    assert_close(found, exact, wanted, dtype, what)
    assert torch.equal(mine.state, net.state), what
    assert torch.equal(mine.inputs[:, : net.count], plain.inputs[:, : net.count]), what
    written = slice(net.count)
    one, other = (h.tail.deltas[:, :, written].transpose(1, 2) for h in (mine, plain))
    assert_close(one, deltas, other, dtype, f"deltas, {what}")
    for one, other in zip((mine.inputs, *mine.tail), (plain.inputs, *plain.tail), strict=True):
        axis = 1 if one is mine.inputs else 2
        assert one.narrow(axis, net.count, RING - net.count).isnan().all(), what
        near = dict(rtol=2e-5, atol=2e-5) if dtype == torch.float32 else dict(rtol=0.02, atol=0.02)
        torch.testing.assert_close(
            one.narrow(axis, 0, net.count), other.narrow(axis, 0, net.count), **near
        )


def check_rows_alone(device: str, shape: Shape, dtype: torch.dtype, first: int) -> None:
    """Steps of 1, 2, 4 and 8 tokens leave the same bits as single ones, in y and in the rings, also
    where the ring's end lies among them.
    """
    results = []
    for width in (1, 2, 4, 8):
        net = Net(shape, 8, dtype, device, "plain", batch=1)
        held = net.held()
        held.inputs[:] = normal(8, *held.inputs.shape).to(device, dtype)
        y = net.run(held, first, [width] * (8 // width), "triton")
        results.append([y, held.inputs, *held.tail])
    for other in results[1:]:
        for mine, alone in zip(other, results[0], strict=True):
            assert torch.equal(mine.nan_to_num(9.0), alone.nan_to_num(9.0))


class ThreeProducts(TorchFunctionMode):
    """Plain torch's float32 products as tensor cores have them: two parts of TF32 (11 bits) each,
    less the product of the small ones. They lose 2^-22 where float32 loses 2^-24.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__):
            (a, a2), (b, b2) = (_parts(t) for t in args)
            return func(a2, b) + func(a, b2) + func(a, b)
        return func(*args, **(kwargs or {}))


def _parts(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x as the nearest TF32 and that of the rest."""
    high = _tf32(x)
    return high, _tf32(x - high)


def _tf32(x: torch.Tensor) -> torch.Tensor:
    return ((x.contiguous().view(torch.int32) + 4096) & -8192).view(torch.float32)


def _turned(
    given: tuple[torch.Tensor, ...], keep: int, form: str, shift: int
) -> tuple[torch.Tensor, torch.Tensor, Tail]:
    """`gated_delta_chunk` with the dimensions of keys turned by `shift`, S turned back."""
    q, k, v, g, beta, state = given
    q, k = q.roll(shift, -1), k.roll(shift, -1)
    out, after, tail = gated_delta_chunk(q, k, v, g, beta, state.roll(shift, 2), keep, form)
    return out, after.roll(-shift, 2), tail


def check_chunk(
    device: str,
    shape: Shape,
    dtype: torch.dtype,
    kind: str,
    count: int,
    keep: int,
    batch: int = 2,
    products: AbstractContextManager[object] | None = None,
) -> None:
    """Compare a prompt's tokens with the oracle and with plain torch: o, S after all but `keep`,
    and the rows of those. q, k and v are parts of one row, as a convolution leaves them.

    Plain torch has two forms, by chunks and token by token, and sums over a head's dimensions from
    any of them on: the bound is twice the error of the worst. products: how plain torch multiplies.
    """
    heads, dk, dv = shape.heads, shape.dk, shape.dv
    rows = normal(count, batch, count, shape.channels).to(device, dtype)
    parts = rows.split([shape.keys * dk, shape.keys * dk, heads * dv], -1)
    q, k, v = (t.unflatten(-1, (-1, d)) for t, d in zip(parts, (dk, dk, dv)))
    g = -(normal(11, batch, count, heads).abs() * 2).to(device)
    beta = normal(12, batch, count, heads).sigmoid().to(device)
    hostile(g, beta, k, kind)
    state = normal(13, batch, heads, dk, dv).to(device)
    given = q, k, v, g, beta, state
    before = state.clone()
    exact, deltas, states = rule(*given)
    found = gated_delta_chunk(*given, keep, "triton")
    with products or nullcontext():
        plain, *others = (
            _turned(given, keep, form, shift)
            for form in ("cpu", "reference")
            for shift in (range(TURNS) if form == "cpu" else (0,))
        )
    what = f"{kind} {shape} {dtype} {count} tokens, {keep} kept"
    assert torch.equal(state, before), what
    whole = count - keep
    oracles = [exact, states[whole], deltas[:, whole:].transpose(1, 2)]
    forms = ((*form[:2], form[2].deltas) for form in (found, plain, *others))
    for oracle, mine, *theirs in zip(oracles, *forms, strict=True):
        if oracle.numel():
            assert_close(mine, oracle, worst(oracle, theirs), torch.float32, what)
    assert torch.equal(found[2].decays, plain[2].decays), what
    torch.testing.assert_close(found[2].keys, plain[2].keys, rtol=1e-6, atol=1e-6)
