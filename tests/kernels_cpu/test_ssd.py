"""Mamba-2's recurrence against a float64 loop over tokens, in every form."""

import itertools

import pytest
import torch

from kernels.recurrent.delta import folded
from kernels.recurrent.ssd import ssd_chunk, ssd_step
from tests.kernels_cpu.test_recurrent import RING, off, ring_of

# (groups, heads for each, ds, dh); Granite 4's small ones have the last
SHAPES = [(2, 1, 8, 16), (1, 3, 16, 8), (4, 2, 33, 48), (1, 4, 128, 64)]
BACKENDS = ("reference", "cpu")


def inputs(count, shape, batch=1, seed=0, decay=2.0):
    """(c, b, x, g, dt, skip, state) of random tokens."""
    groups, each, ds, dh = shape
    heads, draw = groups * each, torch.Generator().manual_seed(seed)

    def normal(*sizes):
        return torch.randn(*sizes, generator=draw)

    c, b = normal(batch, count, groups, ds), normal(batch, count, groups, ds)
    x, dt = normal(batch, count, heads, dh), torch.rand(batch, count, heads, generator=draw)
    g = -dt * torch.rand(heads, generator=draw) * decay
    return c, b, x, g, dt, normal(heads), normal(batch, heads, ds, dh)


def loop(c, b, x, g, dt, skip, state):
    """The formulas in float64, token by token: (y, dt x, [S before, after each token])."""
    c, b, x, g, dt, skip, state = (t.double() for t in (c, b, x, g, dt, skip, state))
    each, out, states = x.shape[2] // b.shape[2], [], [state]
    for i in range(c.shape[1]):
        asked, key = (t[:, i].repeat_interleave(each, 1) for t in (c, b))
        state = state * g[:, i].exp()[..., None, None]
        state = state + torch.einsum("bhs,bhd->bhsd", key, dt[:, i, :, None] * x[:, i])
        out.append(torch.einsum("bhsd,bhs->bhd", state, asked) + skip[:, None] * x[:, i])
        states.append(state)
    return torch.stack(out, 1), dt[..., None] * x, states


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 7, 63, 64, 65, 127, 128, 131, 511, 513, 577])
def test_a_chunk_is_the_loop_over_its_tokens(count, shape, backend):
    given = inputs(count, shape, batch=2)
    out, added, states = loop(*given)
    before = given[-1].clone()
    for keep in {0, 1, min(count, 8), min(count, 66), count}:
        found, state, tail = ssd_chunk(*given, keep, backend)
        assert off(found, out) < 5e-6
        assert off(state, states[count - keep]) < 5e-6
        assert [part.shape[2] for part in tail] == [keep] * 3
        if keep:
            assert off(tail.deltas.transpose(1, 2), added[:, count - keep :]) < 5e-6
            assert torch.equal(tail.keys.transpose(1, 2), given[1][:, count - keep :])
            assert torch.equal(tail.decays.transpose(1, 2), given[3][:, count - keep :])
        assert torch.equal(given[-1], before)


@pytest.mark.parametrize("decay", [0.02, 2.0, 60.0])
def test_slow_and_fast_decays_are_as_near_as_the_recurrent_form(decay):
    """Slow ones have the most to sum; fast ones make sums of hundreds, whose differences count."""
    given = inputs(640, SHAPES[3], decay=decay)
    out, _, states = loop(*given)
    chunk, recurrent = (ssd_chunk(*given, 0, backend) for backend in ("cpu", "reference"))
    for wanted, found, plain in zip((out, states[-1]), chunk, recurrent):
        assert off(found, wanted) < 4 * off(plain, wanted) < 1e-5


def test_a_token_that_forgets_everything_leaves_the_next_ones_alone():
    """Sums of decays reach -60,000 within a chunk; in float32 their differences would be off by
    0.004.
    """
    given = inputs(64, SHAPES[3])
    given[3][:, ::2] = -2000.0
    out, _, states = loop(*given)
    found, state, _ = ssd_chunk(*given, 0, "cpu")
    assert off(found, out) < 2e-6 and off(state, states[-1]) < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_of_any_width_are_the_loop(shape, backend):
    """Tokens come one to eight at a time; rows go into the state whenever there are enough."""
    *tokens, skip, state = inputs(90, shape, batch=2)
    out, _, states = loop(*tokens, skip, state)
    tail, base, at = ring_of(shape, 2), 0, 0
    for width in itertools.cycle((1, 3, 8, 2, 1, 7, 1)):
        part = slice(at, min(at + width, 90))
        positions = torch.arange(part.start, part.stop).expand(2, -1)
        where, held = torch.full((2,), base), state.clone()
        found = ssd_step(
            *(t[:, part] for t in tokens), skip, state, tail, where, positions, backend
        )
        assert off(found, out[:, part]) < 5e-6
        assert torch.equal(state, held)
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
    *tokens, skip, state = inputs(12, shape, batch=2)
    tail, base = ring_of(shape, 2), torch.tensor([29, 3])
    positions, held = base[:, None] + torch.arange(12), state.clone()

    def step(first, stop):
        part = (t[:, first:stop] for t in tokens)
        return ssd_step(*part, skip, state, tail, base, positions[:, first:stop], backend)

    first = step(0, 4)
    rows = [t.clone() for t in tail]
    step(4, 12)
    again = step(0, 4)
    assert off(again, first) < 1e-6 and torch.equal(state, held)
    for now, before in zip(tail, rows):
        for n in range(2):
            mine = positions[n, :4] % RING
            others = [i for i in range(RING) if i not in positions[n] % RING]
            assert off(now[n][:, mine], before[n][:, mine]) < 1e-6
            assert torch.equal(now[n][:, others], before[n][:, others])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_of_any_dtype_and_stride(dtype, backend):
    """x, b and c are parts of one row, as a convolution leaves them."""
    shape = groups, each, ds, dh = SHAPES[2]
    c, b, x, g, dt, skip, state = inputs(4, shape)
    rows = torch.cat([t.flatten(2) for t in (x, b, c)], 2).to(dtype)
    parts = rows.split([groups * each * dh, groups * ds, groups * ds], 2)
    x, b, c = (part.unflatten(2, (-1, d)) for part, d in zip(parts, (dh, ds, ds)))
    wanted, _, _ = loop(c, b, x, g, dt, skip, state)
    where = torch.zeros(1, dtype=torch.long), torch.arange(4)[None]
    found = ssd_step(c, b, x, g, dt, skip, state, ring_of(shape), *where, backend)
    assert off(found, wanted) < 2e-6
    assert off(ssd_chunk(c, b, x, g, dt, skip, state, 1, backend)[0], wanted) < 2e-6
