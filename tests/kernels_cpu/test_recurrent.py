"""The gated delta rule and its convolution against float64 loops over tokens."""

import itertools

import pytest
import torch

from kernels.recurrent.conv import conv_chunk, conv_step
from kernels.recurrent.delta import (
    EPS,
    Tail,
    folded,
    gated_delta_chunk,
    gated_delta_step,
)

RING = 32
# (key heads, value heads for each, dk, dv)
SHAPES = [(2, 1, 8, 16), (1, 3, 16, 8), (4, 2, 32, 32)]
BACKENDS = ("reference", "cpu")


def inputs(count, shape, batch=1, seed=0, decay=2.0):
    """(q, k, v, g, beta, state) of random tokens."""
    heads, group, dk, dv = shape
    draw = torch.Generator().manual_seed(seed)

    def normal(*sizes):
        return torch.randn(*sizes, generator=draw)

    def uniform(*sizes):
        return torch.rand(*sizes, generator=draw)

    q, k = normal(batch, count, heads, dk), normal(batch, count, heads, dk) * 3
    v = normal(batch, count, heads * group, dv)
    g, beta = -uniform(batch, count, heads * group) * decay, uniform(batch, count, heads * group)
    return q, k, v, g, beta, normal(batch, heads * group, dk, dv)


def loop(q, k, v, g, beta, state):
    """The formulas in float64, token by token: (o, d, [S before, after each token])."""
    q, k, v, g, beta, state = (t.double() for t in (q, k, v, g, beta, state))
    group = v.shape[2] // k.shape[2]
    q, k = ((t / (t.square().sum(-1, keepdim=True) + EPS).sqrt()) for t in (q, k))
    q = q / q.shape[-1] ** 0.5
    out, deltas, states = [], [], [state]
    for i in range(q.shape[1]):
        query, key = (t[:, i].repeat_interleave(group, 1) for t in (q, k))
        state = state * g[:, i].exp()[..., None, None]
        found = torch.einsum("bhkv,bhk->bhv", state, key)
        deltas.append((v[:, i] - found) * beta[:, i, :, None])
        state = state + torch.einsum("bhk,bhv->bhkv", key, deltas[-1])
        out.append(torch.einsum("bhkv,bhk->bhv", state, query))
        states.append(state)
    return torch.stack(out, 1), torch.stack(deltas, 1), states


def ring_of(shape, batch=1):
    heads, group, dk, dv = shape
    return Tail(
        torch.zeros(batch, heads, RING, dk),
        torch.zeros(batch, heads * group, RING, dv),
        torch.zeros(batch, heads * group, RING),
    )


def off(found, wanted):
    """The largest error, of the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 127, 128, 511, 513, 577])
def test_a_chunk_is_the_loop_over_its_tokens(count, shape, backend):
    given = inputs(count, shape, batch=2)
    out, deltas, states = loop(*given)
    for keep in {0, 1, min(count, 8)}:
        found, state, tail = gated_delta_chunk(*given, keep, backend)
        assert off(found, out) < 5e-6
        assert off(state, states[count - keep]) < 5e-6
        assert tail.keys.shape[2] == keep
        if keep:
            assert off(tail.deltas.transpose(1, 2), deltas[:, count - keep :]) < 5e-6


def test_the_chunk_wise_form_is_as_near_as_the_recurrent_one():
    """Over slow decays the products of 64 tokens have the most to cancel. The chunk-wise form may
    err by a few roundings more than the recurrent one, whose errors decay with the state.
    """
    given = inputs(640, (2, 2, 64, 64), decay=0.02)
    out, _, states = loop(*given)
    chunk, recurrent = (gated_delta_chunk(*given, 0, backend) for backend in ("cpu", "reference"))
    for wanted, found, plain in zip((out, states[-1]), chunk, recurrent):
        assert off(found, wanted) < 8 * off(plain, wanted) < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_of_any_width_are_the_loop(shape, backend):
    """Tokens come one to eight at a time; rows go into the state whenever there are enough."""
    given = inputs(90, shape, batch=2)
    out, _, states = loop(*given)
    *tokens, state = given
    tail, base, at = ring_of(shape, 2), 0, 0
    for width in itertools.cycle((1, 3, 8, 2, 1, 1)):
        part = slice(at, min(at + width, 90))
        positions = torch.arange(part.start, part.stop).expand(2, -1)
        mine = (t[:, part] for t in tokens)
        where = torch.full((2,), base), positions
        found = gated_delta_step(*mine, state, tail, *where, backend)
        assert off(found, out[:, part]) < 5e-6
        at = part.stop
        if at == 90:
            break
        if at - base > 20:
            state, base = folded(state, tail, base, 13, backend), base + 13
            assert off(state, states[base]) < 5e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_writes_its_own_rows_and_can_be_taken_back(backend):
    """A second step at the same positions finds what the first one found, whatever rows other
    tokens left beyond; sequences of a batch stand at different lengths.
    """
    shape = SHAPES[2]
    *tokens, state = inputs(12, shape, batch=2)
    tail, base = ring_of(shape, 2), torch.tensor([29, 3])
    positions = base[:, None] + torch.arange(12)
    held = state.clone()
    first = gated_delta_step(*(t[:, :4] for t in tokens), state, tail, base, positions[:, :4])
    rows = [t.clone() for t in tail]
    gated_delta_step(*(t[:, 4:] for t in tokens), state, tail, base, positions[:, 4:], backend)
    again = gated_delta_step(
        *(t[:, :4] for t in tokens), state, tail, base, positions[:, :4], backend
    )
    assert off(again, first) < 1e-6
    assert torch.equal(state, held)
    for now, before in zip(tail, rows):
        for b in range(2):
            mine = positions[b, :4] % RING
            others = [i for i in range(RING) if i not in positions[b] % RING]
            assert off(now[b][:, mine], before[b][:, mine]) < 1e-6
            assert torch.equal(now[b][:, others], before[b][:, others])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 64, 131])
def test_the_convolution_is_a_loop_over_taps(count, backend):
    draw = torch.Generator().manual_seed(count)
    x, weight, bias = (torch.randn(*s, generator=draw) for s in ((2, count, 10), (10, 4), (10,)))
    before = torch.randn(2, 3, 10, generator=draw)
    wide = torch.cat((before, x), 1).double()
    wanted = torch.zeros(2, count, 10, dtype=torch.float64)
    for i, tap in itertools.product(range(count), range(4)):
        wanted[:, i] += wide[:, i + tap] * weight[:, tap].double()
    shifted = wanted + bias.double()
    shifted = shifted * torch.sigmoid(shifted)
    assert off(conv_chunk(x, before, weight, backend, bias), shifted) < 1e-6
    wanted = wanted * torch.sigmoid(wanted)
    assert off(conv_chunk(x, before, weight, backend), wanted) < 1e-6
    ring, found = torch.full((2, RING, 10), 9.0), []
    for at in range(
        count
    ):  # from position 0 on, where what the ring held before counts for nothing
        positions = torch.full((2, 1), at)
        found.append(conv_step(x[:, at : at + 1], ring, positions, weight, backend, bias))
    alone = conv_chunk(x, torch.zeros(2, 3, 10), weight, "reference", bias)
    assert off(torch.cat(found, 1), alone.double()) < 1e-6
