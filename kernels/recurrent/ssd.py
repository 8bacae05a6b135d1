"""The state-space recurrence of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060), for the few tokens of
a step and for a prompt's chunk.

    ssd_step(c, b, x, g, dt, skip, state, tail, base, positions, backend) -> y
    ssd_chunk(c, b, x, g, dt, skip, state, keep, backend) -> (y, state, tail)

For each head, with g = dt * A at most 0:

    S = exp(g) S + b (dt x)^T;  y = S^T c + skip x

What a token brings to S does not depend on S. So a sequence is held as the delta rule's is
(kernels/recurrent/delta.py): S after `base` tokens, and a tail of rows with b as the key, dt x as
the delta and g as the decay; `folded` moves rows into S there and here.

Shapes: B sequences, Q tokens of a step (1 to 8), N tokens of a chunk, G groups that share b and c,
H = r * G heads (head h reads group h // r), ds the state's dimension, dh the head's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.launch.dispatch import choose
from kernels.native.library import Case
from kernels.recurrent import native_ssd
from kernels.recurrent.delta import CHUNK, SEGMENT, Tail, folded_ref
from kernels.recurrent.gpu import ssd_chunk as gpu

# ---------------------------------------------------------------- a step


def ssd_step(
    c: torch.Tensor,
    b: torch.Tensor,
    x: torch.Tensor,
    g: torch.Tensor,
    dt: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    tail: Tail,
    base: torch.Tensor,
    positions: torch.Tensor,
    backend: str = "auto",
) -> torch.Tensor:
    """Run the Q tokens at `positions` int64 [B, Q], which follow each other: y float32
    [B, Q, H, dh].

    c, b [B, Q, G, ds] and x [B, Q, H, dh], floats; g (at most 0) and dt float32 [B, Q, H]; skip
    float32 [H]. state float32 [B, H, ds, dh]: S after base int64 [B] tokens. tail: a ring of T
    rows, T at least positions[:, -1] - base + 1; it holds the tokens base .. positions[:, 0] - 1
    and gets the rows of `positions`. No other row and no state changes, and no index visits the
    host.
    """
    given = c, b, x, g, dt, skip, state, tail, base, positions
    chosen = choose(backend, c, lambda: native_ssd.takes_step(c, b, x, state))
    if chosen == "reference":
        return ssd_step_ref(*given)
    if chosen == "native":
        return native_ssd.ssd_step((c, b, x, g, dt, skip), state, tail, base, positions)
    return ssd_step_torch(*given)


def ssd_step_ref(
    c: torch.Tensor,
    b: torch.Tensor,
    x: torch.Tensor,
    g: torch.Tensor,
    dt: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    tail: Tail,
    base: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Reference of `ssd_step`, same arguments: token by token, on the host's indices."""
    c, b, x = c.float(), b.float(), x.float()
    size, group = tail.keys.shape[2], x.shape[2] // b.shape[2]
    out, added = torch.empty_like(x), dt[..., None] * x
    for n in range(len(c)):
        first = int(positions[n, 0])
        rows = Tail(*(t[n : n + 1] for t in tail))
        held = folded_ref(state[n : n + 1], rows, int(base[n]), first - int(base[n]))
        for i in range(c.shape[1]):
            asked, key = (t[n : n + 1, i].repeat_interleave(group, 1) for t in (c, b))
            held = _after(held, key, added[n : n + 1, i], g[n : n + 1, i])
            out[n, i] = (held * asked[..., None]).sum(-2)[0] + skip[:, None] * x[n, i]
            slot = (first + i) % size
            tail.keys[n, :, slot], tail.deltas[n, :, slot] = b[n, i], added[n, i]
            tail.decays[n, :, slot] = g[n, i]
    return out


def _after(
    state: torch.Tensor, b: torch.Tensor, added: torch.Tensor, g: torch.Tensor
) -> torch.Tensor:
    """S after one token, as the formula stands: b [B, H, ds], added [B, H, dh], g [B, H]."""
    return state * g.exp()[..., None, None] + b[..., None] * added[..., None, :]


def ssd_step_torch(
    c: torch.Tensor,
    b: torch.Tensor,
    x: torch.Tensor,
    g: torch.Tensor,
    dt: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    tail: Tail,
    base: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """`ssd_step` by torch's operators: the rows of the step's tokens join the ring first, and every
    token reads S and the rows up to its own.
    """
    batch, heads = len(c), b.shape[2]
    c, b, x = (t.float().transpose(1, 2) for t in (c, b, x))  # heads before tokens
    size = tail.keys.shape[2]
    sequences, slots = torch.arange(batch, device=c.device)[:, None], positions % size
    tail.keys[sequences, :, slots] = b.transpose(1, 2)
    tail.deltas[sequences, :, slots] = (x * dt.transpose(1, 2)[..., None]).transpose(1, 2)
    tail.decays[sequences, :, slots] = g
    passed, weights = _decays(tail.decays, base, positions)
    asked = c.unsqueeze(2)  # [B, G, 1, Q, ds]
    out = (asked @ state.unflatten(1, (heads, -1))).flatten(1, 2) * passed.exp()[..., None]
    near = (asked @ tail.keys.mT.unsqueeze(2)) * weights.unflatten(1, (heads, -1))
    out = out + near.flatten(1, 2) @ tail.deltas
    return torch.addcmul(out, x, skip[:, None, None]).transpose(1, 2)


def _decays(
    decays: torch.Tensor, base: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log decay of S up to each token [B, H, Q], what each row of the ring has decayed to by then
    [B, H, Q, T], 0 for rows that the token does not see).
    """
    size = decays.shape[2]
    order = (torch.arange(size, device=decays.device) - base[:, None]) % size  # [B, T]
    seen = order[:, None] <= (positions - base[:, None])[..., None]  # [B, Q, T]
    later = order[:, :, None] > order[:, None, :]  # row t passed over row s
    passing = torch.where(seen[:, None], decays[:, :, None], 0.0)  # [B, H, Q, T]
    since = passing @ later[:, None].to(decays.dtype)
    return passing.sum(-1), since.exp() * seen[:, None]


# ---------------------------------------------------------------- a prompt's chunk


def ssd_chunk(
    c: torch.Tensor,
    b: torch.Tensor,
    x: torch.Tensor,
    g: torch.Tensor,
    dt: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    keep: int,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, Tail]:
    """Run N tokens from `state` on: (y float32 [B, N, H, dh], S after the first N - keep tokens,
    the rows of the other `keep` tokens, in their order).

    Arguments as of `ssd_step`, with N for Q; 0 <= keep <= N. Nothing is written to.
    """
    given = c, b, x, g, dt, skip, state, keep
    chosen = choose(backend, c, lambda: native_ssd.takes_chunk(c, b, x, state))
    if chosen == "reference":
        return ssd_chunk_ref(*given)
    if chosen == "native":
        out, after, *rows = native_ssd.ssd_chunk((c, b, x, g, dt, skip), state, keep)
        return out, after, Tail(*rows)
    if chosen == "triton" and state.shape[2] <= gpu.MOST_DIM:
        out, after = gpu.ssd_chunk_triton(*given)
        kept = slice(c.shape[1] - keep, None)
        added = dt[:, kept, :, None] * x[:, kept].float()
        return out, after, _rows(b[:, kept].float(), added, g[:, kept], 0)
    return ssd_chunk_torch(*given)


def ssd_chunk_ref(
    c: torch.Tensor,
    b: torch.Tensor,
    x: torch.Tensor,
    g: torch.Tensor,
    dt: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    keep: int,
) -> tuple[torch.Tensor, torch.Tensor, Tail]:
    """Reference of `ssd_chunk`, same arguments: the recurrent form."""
    c, b, x = c.float(), b.float(), x.float()
    count, group = c.shape[1], x.shape[2] // b.shape[2]
    out, added, held = torch.empty_like(x), dt[..., None] * x, state
    for i in range(count):
        asked, key = (t[:, i].repeat_interleave(group, 1) for t in (c, b))
        if i == count - keep:
            held = state
        state = _after(state, key, added[:, i], g[:, i])
        out[:, i] = (state * asked[..., None]).sum(-2) + skip[:, None] * x[:, i]
    return out, held if keep else state, _rows(b, added, g, count - keep)


def ssd_chunk_torch(
    c: torch.Tensor,
    b: torch.Tensor,
    x: torch.Tensor,
    g: torch.Tensor,
    dt: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    keep: int,
) -> tuple[torch.Tensor, torch.Tensor, Tail]:
    """`ssd_chunk` by torch's operators, in the chunk-wise form: products of CHUNK tokens at a time
    (the paper's section 6).
    """
    whole, x = c.shape[1] - keep, x.float()
    tokens = c.float(), b.float(), dt[..., None] * x, g
    out = torch.empty_like(x)
    for first in range(0, whole, CHUNK * SEGMENT):
        part = slice(first, min(whole, first + CHUNK * SEGMENT))
        out[:, part], state = _segment([t[:, part] for t in tokens], state)
    if keep:
        out[:, whole:], _ = _segment([t[:, whole:] for t in tokens], state)
    return out.addcmul_(x, skip[:, None]), state, _rows(*tokens[1:], whole)


def _rows(b: torch.Tensor, added: torch.Tensor, g: torch.Tensor, first: int) -> Tail:
    """The rows of the tokens from `first` on."""
    return Tail(*(t[:, first:].transpose(1, 2).contiguous() for t in (b, added, g)))


def _segment(tokens: list[torch.Tensor], state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(S^T c, S after them) of a few chunks of tokens (c, b, dt x and g)."""
    c, b, added, g = tokens
    count, heads = c.shape[1], b.shape[2]
    size = min(CHUNK, count)
    short = -count % size  # tokens that change nothing fill the last chunk
    c, b, added, g = (
        torch.cat((t, t.new_zeros(t.shape[0], short, *t.shape[2:])), 1) if short else t
        for t in (c, b, added, g)
    )
    # [B, G, chunks, CHUNK, ds], and the heads' [B, G, r, chunks, CHUNK, dh]
    c, b = (t.transpose(1, 2).unflatten(2, (-1, size)) for t in (c, b))
    added, g = (
        t.transpose(1, 2).unflatten(2, (-1, size)).unflatten(1, (heads, -1)) for t in (added, g)
    )
    # differences of large sums: a head may forget all in one token and little in the next
    passed = g.double().cumsum(-1)
    above = torch.ones(size, size, dtype=torch.bool, device=c.device).triu_(1)
    since = (passed[..., :, None] - passed[..., None, :]).float()
    weights = (c @ b.mT).unsqueeze(2) * since.masked_fill_(above, -torch.inf).exp_()
    out = weights @ added
    late = (passed[..., -1:] - passed).float().exp()[..., None]
    brought = b.mT.unsqueeze(2) @ (added * late)  # what each chunk adds to S
    last = passed[..., -1].float().exp()[..., None, None]
    early, c = passed.float().exp()[..., None], c.unsqueeze(2)
    state = state.unflatten(1, (heads, -1))
    for i in range(out.shape[3]):
        out[:, :, :, i] += (c[:, :, :, i] @ state) * early[:, :, :, i]
        state = state * last[:, :, :, i] + brought[:, :, :, i]
    out = out.flatten(3, 4).flatten(1, 2).transpose(1, 2)[:, :count]
    return out, state.flatten(1, 2)


def _tokens(count: int, ds: int, dh: int) -> tuple[native_ssd.Given, torch.Tensor]:
    """(c, b, x, g, dt and skip, S) of random tokens of two sequences, for self-tests."""
    draw = torch.Generator().manual_seed(1)
    sizes = (2, count, 2, ds), (2, count, 2, ds), (2, count, 6, dh), (6,), (2, 6, ds, dh)
    c, b, x, skip, state = (torch.randn(*size, generator=draw) for size in sizes)
    g, dt = torch.rand(2, 2, count, 6, generator=draw).unbind()
    return (c, b, x, -g, dt, skip), state


@native_ssd.CHUNK.self_test
def _chunks() -> Iterator[Case]:
    for count, keep, ds, dh in ((67, 3, 32, 64), (20, 1, 20, 80), (130, 70, 7, 16)):
        given, state = _tokens(count, ds, dh)
        found, expected = (
            native_ssd.ssd_chunk(given, state, keep),
            ssd_chunk_ref(*given, state, keep),
        )
        names = "output", "state", "key", "delta", "decay"
        for name, mine, theirs in zip(names, found, (*expected[:2], *expected[2])):
            yield f"a prompt's {name}", mine, theirs, torch.float32


@native_ssd.STEP.self_test
def _steps() -> Iterator[Case]:
    draw = torch.Generator().manual_seed(2)
    for count, ds, dh in ((1, 32, 64), (3, 20, 80), (8, 5, 16)):
        given, state = _tokens(count, ds, dh)
        sizes = (2, 2, 32, ds), (2, 6, 32, dh), (2, 6, 32)
        ring = Tail(*(torch.randn(*size, generator=draw) for size in sizes))
        ring.decays.neg_().clamp_(max=0)
        base = torch.tensor([29, 5])
        positions = base[:, None] + 7 + torch.arange(count)
        rings = [Tail(*(part.clone() for part in ring)) for _ in range(2)]
        found = native_ssd.ssd_step(given, state, rings[0], base, positions)
        expected = ssd_step_ref(*given, state, rings[1], base, positions)
        both = zip((found, *rings[0]), (expected, *rings[1]))
        for name, (mine, theirs) in zip(("output", "key", "delta", "decay"), both):
            yield f"a step's {name}", mine, theirs, torch.float32
