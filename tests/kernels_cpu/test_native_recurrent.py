"""A recurrent layer's step in C++ against the float64 loop over tokens."""

import itertools

import pytest
import torch

from kernels.native.library import missing
from kernels.recurrent import native
from kernels.recurrent.conv import conv_step
from kernels.recurrent.delta import folded, gated_delta_step
from tests.kernels_cpu.test_recurrent import RING, inputs, loop, off, ring_of

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "compiles")
# (key heads, value heads for each, dk, dv); Qwen3.5's is the last
SHAPES = [(1, 1, 1, 16), (2, 3, 24, 48), (1, 2, 33, 80), (2, 2, 128, 128)]


@pytest.fixture(params=[1, 2])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_of_any_width_are_the_loop(shape, threads):
    """Sequences of a batch stand at different lengths, and the ring is gone round."""
    given = inputs(90, shape, batch=2)
    out, _, states = loop(*given)
    *tokens, state = given
    assert native.takes_delta(*(t[:, :1] for t in tokens[:3]), state)
    tail, base, at = ring_of(shape, 2), 0, 0
    for width in itertools.cycle((1, 3, 8, 2, 1, 7, 1)):
        part = slice(at, min(at + width, 90))
        positions = torch.arange(part.start, part.stop).expand(2, -1)
        mine = (t[:, part] for t in tokens)
        held = state.clone()
        found = gated_delta_step(*mine, state, tail, torch.full((2,), base), positions, "native")
        assert off(found, out[:, part]) < 5e-6
        assert torch.equal(state, held)
        at = part.stop
        if at == 90:
            break
        if at - base > 20:
            state, base = folded(state, tail, base, 13), base + 13
            assert off(state, states[base]) < 5e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inputs_of_any_dtype_and_stride(dtype):
    """Keys, queries and values are parts of one row, as a projection leaves them."""
    shape = heads, group, dk, dv = SHAPES[1]
    q, k, v, g, beta, state = inputs(4, shape)
    rows = torch.cat([t.flatten(2) for t in (q, k, v)], 2).to(dtype)
    parts = rows.split([heads * dk, heads * dk, heads * group * dv], 2)
    q, k, v = (part.unflatten(2, (-1, d)) for part, d in zip(parts, (dk, dk, dv)))
    wanted, _, _ = loop(q, k, v, g, beta, state)
    where = torch.zeros(1, dtype=torch.long), torch.arange(4)[None]
    found = gated_delta_step(q, k, v, g, beta, state, ring_of(shape), *where, "native")
    assert off(found, wanted) < 2e-6


def test_a_value_that_is_not_finite_stays_in_its_head():
    *tokens, state = inputs(2, SHAPES[1])
    tokens[2][0, 0, 1, 3] = float("nan")
    where = torch.zeros(1, dtype=torch.long), torch.arange(2)[None]
    found = gated_delta_step(*tokens, state, ring_of(SHAPES[1]), *where, "native")
    bad = found.isnan().any(-1).any(1)[0]
    assert bad.tolist() == [False, True, False, False, False, False]


def test_what_it_does_not_take_runs_on_torch():
    """Nine tokens, and heads that are no whole vectors."""
    *tokens, state = inputs(3, (2, 1, 8, 8))
    assert not native.takes_delta(*tokens[:3], state)
    where = torch.zeros(1, dtype=torch.long), torch.arange(3)[None]
    found = gated_delta_step(*tokens, state, ring_of((2, 1, 8, 8)), *where, "native")
    assert off(found, loop(*tokens, state)[0]) < 5e-6
    long = torch.zeros(1, 9, 2, 16)
    assert not native.takes_delta(long, long, long, torch.zeros(1, 2, 16, 16))
    assert native.takes_delta(*(long[:, :8],) * 3, torch.zeros(1, 2, 16, 16))


@pytest.mark.parametrize("channels", [1, 15, 16, 17, 64, 101])
@pytest.mark.parametrize("taps", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_convolution_is_the_references(channels, taps, dtype):
    draw = torch.Generator().manual_seed(channels)
    x = torch.randn(2, 40, 2 * channels, generator=draw).to(dtype)[..., :channels]
    weight = torch.randn(channels, taps, generator=draw).to(dtype)
    rings = torch.full((2, 2, RING, channels), 9.0, dtype=dtype).unbind()
    assert native.takes_conv(x, rings[0], weight)
    results: list[list[torch.Tensor]] = [[], []]
    at = 0
    for width in (1, 3, 8, 1, 2, 8, 8, 1, 7, 1):
        positions = torch.arange(at, at + width).expand(2, -1)
        for ring, backend, parts in zip(rings, ("native", "reference"), results):
            parts.append(conv_step(x[:, at : at + width], ring, positions, weight, backend))
        assert torch.equal(*rings)
        at += width
    wide = torch.cat([torch.zeros(2, taps - 1, channels), x], 1).double()
    wanted = sum(wide[:, tap : tap + 40] * weight[:, tap].double() for tap in range(taps))
    wanted = wanted * torch.sigmoid(wanted)
    found, plain = (off(torch.cat(parts, 1).double(), wanted) for parts in results)
    assert found <= 2 * plain + 1e-8
