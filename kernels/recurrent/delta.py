"""The gated delta rule (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464), for the few tokens of
a step and for a prompt's chunk.

    gated_delta_step(q, k, v, g, beta, state, tail, base, positions, backend) -> o
    gated_delta_chunk(q, k, v, g, beta, state, keep, backend) -> (o, state, tail)
    folded(state, tail, first, count, backend) -> state

For each value head, with k and q of length one and q scaled by dk^-0.5:

    S = exp(g) S;  d = beta (v - S^T k);  S = S + k d^T;  o = S^T q

A sequence is held as S after `base` tokens and a *tail*: the k, d and g of the tokens since, each
in row position % T of a ring. A step reads S, writes the rows of its own tokens and nothing else,
so it can be repeated or given up, and its tokens taken back one by one. `folded` moves rows into S,
every few tokens and outside a step: a step then writes no S at all.

Shapes: B sequences, Q tokens of a step (1 to 8), N tokens of a chunk, Hk key heads, Hv = r * Hk
value heads (head h reads key head h // r), dk and dv their dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from kernels.launch.dispatch import choose
from kernels.native.library import Case
from kernels.recurrent import chunk, native
from kernels.recurrent.chunk import CHUNK

SEGMENT = 8  # chunks whose products are held at a time: bounds a long prompt's memory
EPS = 1e-6  # beside a squared length, as in transformers


# q, k, v, g, beta and the state before them
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Tail(NamedTuple):
    """The rows of tokens that S does not hold yet: float32 keys [B, Hk, T, dk] of length one,
    deltas [B, Hv, T, dv], decays g [B, Hv, T].
    """

    keys: torch.Tensor
    deltas: torch.Tensor
    decays: torch.Tensor


# ---------------------------------------------------------------- a step


def gated_delta_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    tail: Tail,
    base: torch.Tensor,
    positions: torch.Tensor,
    backend: str = "auto",
) -> torch.Tensor:
    """Run the Q tokens at `positions` int64 [B, Q], which follow each other: o float32
    [B, Q, Hv, dv].

    q, k [B, Q, Hk, dk] and v [B, Q, Hv, dv], floats of any lengths; g (at most 0) and beta float32
    [B, Q, Hv]. state float32 [B, Hv, dk, dv]: S after base int64 [B] tokens. tail: a ring of T
    rows, T at least positions[:, -1] - base + 1; it holds the tokens base .. positions[:, 0] - 1
    and gets the rows of `positions`. No other row and no state changes, and no index visits the
    host.
    """
    chosen = choose(backend, q, lambda: native.takes_step(q, k, v, state))
    given = q, k, v, g, beta, state, tail, base, positions
    if chosen == "reference":
        return gated_delta_step_ref(*given)
    if chosen == "native":
        return native.delta_step(*given, EPS)
    return gated_delta_step_torch(*given)


def gated_delta_step_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    tail: Tail,
    base: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Reference of `gated_delta_step`, same arguments: token by token, on the host's indices."""
    q, k, v = unit(q) * q.shape[-1] ** -0.5, unit(k), v.float()
    size, group = tail.keys.shape[2], v.shape[2] // k.shape[2]
    out = torch.empty_like(v)
    for b in range(len(q)):
        first = int(positions[b, 0])
        held = folded_ref(
            state[b : b + 1],
            Tail(*(t[b : b + 1] for t in tail)),
            int(base[b]),
            first - int(base[b]),
        )
        for i in range(q.shape[1]):
            query, key = (t[b : b + 1, i].repeat_interleave(group, 1) for t in (q, k))
            o, delta, held = _token(
                query, key, v[b : b + 1, i], g[b : b + 1, i], beta[b : b + 1, i], held
            )
            slot = (first + i) % size
            tail.keys[b, :, slot], tail.deltas[b, :, slot] = k[b, i], delta[0]
            tail.decays[b, :, slot], out[b, i] = g[b, i], o[0]
    return out


def _token(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token as the formulas stand: q, k [B, Hv, dk], v [B, Hv, dv] -> (o, d, the new S)."""
    state = state * g.exp()[..., None, None]
    delta = (v - (state * k[..., None]).sum(-2)) * beta[..., None]
    state = state + k[..., None] * delta[..., None, :]
    return (state * q[..., None]).sum(-2), delta, state


def gated_delta_step_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    tail: Tail,
    base: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """`gated_delta_step` by torch's operators: S is read once, for the keys and queries of all
    tokens together.
    """
    batch, count, heads, _ = k.shape
    size, group = tail.keys.shape[2], v.shape[2] // heads
    q, k = unit(q) * q.shape[-1] ** -0.5, unit(k)
    both = torch.cat((k, q), 1).transpose(1, 2)  # [B, Hk, 2Q, dk]
    passed, weights = _tail_decays(tail.decays, base, positions)
    old = both.unsqueeze(2) @ state.unflatten(1, (heads, group))  # [B, Hk, r, 2Q, dv]
    old = old * passed.exp().unflatten(1, (heads, group))[..., None, None]
    near = (both @ tail.keys.mT).unsqueeze(2) * weights.unflatten(1, (heads, group)).unsqueeze(3)
    old = (old + near @ tail.deltas.unflatten(1, (heads, group))).flatten(1, 2)
    seen, asked = old[:, :, :count], old[:, :, count:]  # [B, Hv, Q, dv]
    steps = g.cumsum(1).transpose(1, 2)  # [B, Hv, Q]
    v, beta = v.float().transpose(1, 2), beta.transpose(1, 2)
    products = (both @ both[:, :, :count].mT).repeat_interleave(group, 1)  # [B, Hv, 2Q, Q]
    deltas: list[torch.Tensor] = []
    out = []
    for i in range(count):
        mine, wanted = (part[:, :, i] * steps[:, :, i, None].exp() for part in (seen, asked))
        for j, delta in enumerate(deltas):
            since = (steps[:, :, i] - steps[:, :, j]).exp()
            mine = mine + delta * (since * products[:, :, i, j])[..., None]
            wanted = wanted + delta * (since * products[:, :, count + i, j])[..., None]
        deltas.append((v[:, :, i] - mine) * beta[:, :, i, None])
        out.append(wanted + deltas[i] * products[:, :, count + i, i, None])
    rows, slots = torch.arange(batch, device=q.device)[:, None], positions % size
    tail.keys[rows, :, slots] = k
    tail.deltas[rows, :, slots] = torch.stack(deltas, 1)
    tail.decays[rows, :, slots] = g
    return torch.stack(out, 1)


def _tail_decays(
    decays: torch.Tensor, base: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log decay of S over the tail's tokens [B, Hv], what each row of the ring has decayed to
    since [B, Hv, T], 0 for rows that hold no token before the step).
    """
    size = decays.shape[2]
    order = (torch.arange(size, device=decays.device) - base[:, None]) % size  # [B, T]
    held = order < (positions[:, :1] - base[:, None])
    later = (order[:, :, None] > order[:, None, :]) & held[:, :, None]  # row t passed over row s
    decays = decays * held[:, None]
    since = (decays @ later.to(decays.dtype)).exp() * held[:, None]
    return decays.sum(-1), since


# ---------------------------------------------------------------- a prompt's chunk


def gated_delta_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    keep: int,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, Tail]:
    """Run N tokens from `state` on: (o float32 [B, N, Hv, dv], S after the first N - keep tokens,
    the rows of the other `keep` tokens, in their order).

    Arguments as of `gated_delta_step`, with N for Q; 0 <= keep <= N. Nothing is written to.
    """
    given = q, k, v, g, beta, state, keep
    chosen = choose(backend, q, lambda: native.takes_chunk(q, k, v, state))
    if chosen == "reference":
        return gated_delta_chunk_ref(*given)
    if chosen == "native":
        out, after, *rows = native.delta_chunk(*given, EPS)
        return out, after, Tail(*rows)
    if chosen == "triton" and max(state.shape[2:]) <= chunk.MOST_DIM:
        out, after, *rows = chunk.delta_chunk(*given, EPS)
        return out, after, Tail(*rows)
    return gated_delta_chunk_torch(*given)


def gated_delta_chunk_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    keep: int,
) -> tuple[torch.Tensor, torch.Tensor, Tail]:
    """Reference of `gated_delta_chunk`, same arguments: the recurrent form."""
    q, k, v = unit(q) * q.shape[-1] ** -0.5, unit(k), v.float()
    count, group = q.shape[1], v.shape[2] // k.shape[2]
    out, deltas, held = torch.empty_like(v), torch.empty_like(v), state
    for i in range(count):
        query, key = (t[:, i].repeat_interleave(group, 1) for t in (q, k))
        if i == count - keep:
            held = state
        out[:, i], deltas[:, i], state = _token(query, key, v[:, i], g[:, i], beta[:, i], state)
    rows = Tail(*(t[:, count - keep :].transpose(1, 2).contiguous() for t in (k, deltas, g)))
    return out, held if keep else state, rows


def gated_delta_chunk_torch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    keep: int,
) -> tuple[torch.Tensor, torch.Tensor, Tail]:
    """`gated_delta_chunk` by torch's operators, in the chunk-wise form: products of CHUNK tokens at
    a time (the paper's section 3.3; the inverse by a triangular solve).
    """
    whole, tokens = q.shape[1] - keep, (q, k, v, g, beta)
    out = torch.empty_like(v, dtype=torch.float32)
    for first in range(0, whole, CHUNK * SEGMENT):
        part = slice(first, min(whole, first + CHUNK * SEGMENT))
        out[:, part], _, state = _segment([t[:, part] for t in tokens], state)
    deltas = out[:, whole:]
    if keep:
        out[:, whole:], deltas, _ = _segment([t[:, whole:] for t in tokens], state)
    rows = unit(k[:, whole:]), deltas, g[:, whole:]
    return out, state, Tail(*(t.transpose(1, 2).contiguous() for t in rows))


def _segment(
    tokens: list[torch.Tensor], state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(o, d, S after them) of a few chunks of tokens (q, k, v, g and beta), o and d
    as v.
    """
    q, k, v, g, beta = tokens
    count, heads, group = q.shape[1], k.shape[2], v.shape[2] // k.shape[2]
    size = min(CHUNK, count)
    short = -count % size  # tokens that change nothing fill the last chunk: k, beta and g of 0
    q, k, v = unit(q) * q.shape[-1] ** -0.5, unit(k), v.float()
    q, k, v, g, beta = (
        torch.cat((t, t.new_zeros(t.shape[0], short, *t.shape[2:])), 1) if short else t
        for t in (q, k, v, g, beta)
    )
    # [B, Hk, chunks, CHUNK, d], and the value heads' [B, Hk, r, chunks, CHUNK, d]
    q, k = (t.transpose(1, 2).unflatten(2, (-1, size)) for t in (q, k))
    v, beta, g = (
        t.transpose(1, 2).unflatten(2, (-1, size)).unflatten(1, (heads, group))
        for t in (v, beta[..., None], g)
    )
    passed = g.cumsum(-1)
    above = torch.ones(size, size, dtype=torch.bool, device=q.device).triu_(1)
    decays = (passed[..., :, None] - passed[..., None, :]).masked_fill_(above, -torch.inf).exp_()
    products = torch.cat((k, q), -2) @ k.mT  # [B, Hk, chunks, 2 CHUNK, CHUNK]
    among, asked = (part.unsqueeze(2) * decays for part in products.split(size, -2))
    wide = k.unsqueeze(2) * (beta * passed[..., None].exp())
    solved = torch.linalg.solve_triangular(
        among.mul_(beta), torch.cat((v * beta, wide), -1), upper=False, unitriangular=True
    )
    values, reads = solved.split((v.shape[-1], k.shape[-1]), -1)
    last = passed[..., -1:]
    late = (k.unsqueeze(2) * (last - passed).exp()[..., None]).mT
    early, last = q.unsqueeze(2) * passed[..., None].exp(), last.exp()[..., None]
    state = state.unflatten(1, (heads, group))
    out, deltas = torch.empty_like(values), torch.empty_like(values)
    for i in range(values.shape[3]):
        delta = values[:, :, :, i] - reads[:, :, :, i] @ state
        out[:, :, :, i] = early[:, :, :, i] @ state + asked[:, :, :, i] @ delta
        state = state * last[:, :, :, i] + late[:, :, :, i] @ delta
        deltas[:, :, :, i] = delta
    out, deltas = (t.flatten(3, 4).flatten(1, 2).transpose(1, 2)[:, :count] for t in (out, deltas))
    return out, deltas, state.flatten(1, 2)


# ---------------------------------------------------------------- the tail into the state


def folded(
    state: torch.Tensor, tail: Tail, first: int, count: int, backend: str = "auto"
) -> torch.Tensor:
    """Return S after the `count` tokens from position `first` on, whose rows are in the ring
    `tail`: a new tensor, float32 [B, Hv, dk, dv]. state: S after `first` tokens.
    """
    if choose(backend, state) == "reference":
        return folded_ref(state, tail, first, count)
    if count == 0:
        return state.clone()
    size, heads = tail.keys.shape[2], tail.keys.shape[1]
    slots = torch.arange(first, first + count, device=state.device) % size
    keys, deltas, decays = (t.index_select(2, slots) for t in tail)
    passed = decays.cumsum(-1)
    deltas = deltas * (passed[..., -1:] - passed).exp()[..., None]
    grouped = deltas.unflatten(1, (heads, -1))
    added = (keys.mT.unsqueeze(2) @ grouped).flatten(1, 2)
    return added.addcmul_(state, passed[..., -1, None, None].exp())


def folded_ref(state: torch.Tensor, tail: Tail, first: int, count: int) -> torch.Tensor:
    """Reference of `folded`, same arguments: row by row."""
    state = state.clone()
    group = state.shape[1] // tail.keys.shape[1]
    for position in range(first, first + count):
        slot = position % tail.keys.shape[2]
        key = tail.keys[:, :, slot].repeat_interleave(group, 1)
        state = state * tail.decays[:, :, slot].exp()[..., None, None]
        state = state + key[..., None] * tail.deltas[:, :, slot][..., None, :]
    return state


def unit(x: torch.Tensor) -> torch.Tensor:
    """x [..., d] divided by its length, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)


def _tokens(count: int, dk: int, dv: int) -> Tokens:
    """(q, k, v, g, beta, state) of random tokens of two sequences, for self-tests."""
    draw = torch.Generator().manual_seed(1)
    sizes = (2, count, 2, dk), (2, count, 2, dk), (2, count, 4, dv), (2, 4, dk, dv)
    q, k, v, state = (torch.randn(*size, generator=draw) for size in sizes)
    g, beta = torch.rand(2, 2, count, 4, generator=draw).unbind()
    return q, k, v, -g, beta, state


@native.CHUNK.self_test
def _chunks() -> Iterator[Case]:
    for count, keep, dk, dv in ((67, 3, 32, 64), (20, 1, 20, 80), (130, 70, 8, 16)):
        given = _tokens(count, dk, dv)
        found, expected = native.delta_chunk(*given, keep, EPS), gated_delta_chunk_ref(*given, keep)
        both = zip(
            ("output", "state", "key", "delta", "decay"), found, (*expected[:2], *expected[2])
        )
        for name, mine, theirs in both:
            yield f"a prompt's {name}", mine, theirs, torch.float32


@native.DELTA.self_test
def _steps() -> Iterator[Case]:
    draw = torch.Generator().manual_seed(2)
    for count, dk, dv in ((1, 32, 64), (3, 20, 80)):
        q, k, v, g, beta, state = _tokens(count, dk, dv)
        sizes = (2, 2, 16, dk), (2, 4, 16, dv), (2, 4, 16)
        ring = Tail(*(torch.randn(*size, generator=draw) for size in sizes))
        ring.decays.neg_().clamp_(max=0)
        base = torch.tensor([13, 5])
        positions = base[:, None] + 7 + torch.arange(count)
        results = []
        for run in (partial(native.delta_step, eps=EPS), gated_delta_step_ref):
            rows = Tail(*(part.clone() for part in ring))
            results.append((run(q, k, v, g, beta, state, rows, base, positions), *rows))
        for name, found, expected in zip(("output", "key", "delta", "decay"), *results):
            yield f"a step's {name}", found, expected, torch.float32
