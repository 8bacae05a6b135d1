"""Mamba-2's recurrence in C++ against the float64 loop over tokens."""

import itertools

import pytest
import torch

from kernels.native.library import missing
from kernels.recurrent import native_ssd
from kernels.recurrent.delta import folded
from kernels.recurrent.ssd import ssd_chunk, ssd_step
from tests.kernels_cpu.test_recurrent import off, ring_of
from tests.kernels_cpu.test_ssd import inputs, loop

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "compiles")
# (groups, heads for each, ds, dh); Granite 4's small ones have the last
SHAPES = [(1, 1, 1, 16), (2, 3, 24, 48), (1, 5, 33, 80), (1, 4, 128, 64)]


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_of_any_width_are_the_loop(shape, threads):
    """Rows go into the state whenever there are enough, and the ring is gone round."""
    *tokens, skip, state = inputs(90, shape, batch=2)
    out, _, states = loop(*tokens, skip, state)
    assert native_ssd.takes_step(*(t[:, :1] for t in tokens[:3]), state)
    tail, base, at = ring_of(shape, 2), 0, 0
    for width in itertools.cycle((1, 3, 8, 2, 1, 7, 5, 1)):
        part = slice(at, min(at + width, 90))
        positions, held = torch.arange(part.start, part.stop).expand(2, -1), state.clone()
        mine = (t[:, part] for t in tokens)
        where = torch.full((2,), base), positions
        found = ssd_step(*mine, skip, state, tail, *where, "native")
        assert off(found, out[:, part]) < 5e-6
        assert torch.equal(state, held)
        at = part.stop
        if at == 90:
            break
        if at - base > 20:
            state, base = folded(state, tail, base, 13), base + 13
            assert off(state, states[base]) < 5e-6


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 7, 63, 64, 65, 128, 131, 200])
def test_a_prompt_is_the_loop_over_its_tokens(count, shape, set_threads):
    given = inputs(count, shape, batch=2)
    out, added, states = loop(*given)
    assert native_ssd.takes_chunk(*given[:3], given[-1])
    before = given[-1].clone()
    for threads, keep in itertools.product((1, 2), {0, 1, min(count, 8), min(count, 66), count}):
        set_threads(threads)
        found, state, tail = ssd_chunk(*given, keep, "native")
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
    """Slow ones have the most to sum, fast ones leave nothing of S: exp(p) is 0 then."""
    given = inputs(320, SHAPES[1], decay=decay)
    out, _, states = loop(*given)
    native_form, plain = (ssd_chunk(*given, 0, name) for name in ("native", "reference"))
    for wanted, found, other in zip((out, states[-1]), native_form, plain):
        assert off(found, wanted) < 4 * off(other, wanted) < 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_inputs_of_any_dtype_and_stride(dtype):
    """x, b and c are parts of one row, as a convolution leaves them; sequences of a batch stand at
    different lengths.
    """
    shape = groups, each, ds, dh = SHAPES[1]
    c, b, x, g, dt, skip, state = inputs(4, shape, batch=2)
    rows = torch.cat([t.flatten(2) for t in (x, b, c)], 2).to(dtype)
    parts = rows.split([groups * each * dh, groups * ds, groups * ds], 2)
    x, b, c = (part.unflatten(2, (-1, d)) for part, d in zip(parts, (dh, ds, ds)))
    wanted, _, states = loop(c, b, x, g, dt, skip, state)
    base = torch.tensor([29, 3])
    where = base, base[:, None] + torch.arange(4)
    found = ssd_step(c, b, x, g, dt, skip, state, ring_of(shape, 2), *where, "native")
    assert off(found, wanted) < 2e-6
    found, after, _ = ssd_chunk(c, b, x, g, dt, skip, state, 0, "native")
    assert off(found, wanted) < 2e-6 and off(after, states[-1]) < 2e-6


def test_a_value_that_is_not_finite_stays_in_its_head():
    *tokens, skip, state = inputs(2, SHAPES[1])
    tokens[2][0, 0, 1, 3] = float("nan")
    where = torch.zeros(1, dtype=torch.long), torch.arange(2)[None]
    found = ssd_step(*tokens, skip, state, ring_of(SHAPES[1]), *where, "native")
    wanted = [False, True, False, False, False, False]
    assert found.isnan().any(-1).any(1)[0].tolist() == wanted
    found, _, _ = ssd_chunk(*tokens, skip, state, 0, "native")
    assert found.isnan().any(-1).any(1)[0].tolist() == wanted


def test_what_it_does_not_take_runs_on_torch():
    """Nine tokens, and heads that are no whole vectors."""
    *tokens, skip, state = inputs(3, (2, 1, 8, 8))
    assert not native_ssd.takes_step(*tokens[:3], state)
    where = torch.zeros(1, dtype=torch.long), torch.arange(3)[None]
    found = ssd_step(*tokens, skip, state, ring_of((2, 1, 8, 8)), *where, "native")
    assert off(found, loop(*tokens, skip, state)[0]) < 5e-6
    long = torch.zeros(1, 9, 2, 16)
    assert not native_ssd.takes_step(long, long, long, torch.zeros(1, 2, 16, 16))
    assert native_ssd.takes_step(*(long[:, :8],) * 3, torch.zeros(1, 2, 16, 16))
