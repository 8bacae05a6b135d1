"""A recurrent layer's step in C++ against the float64 loop over tokens."""

import itertools

import pytest
import torch

from kernels.native.library import missing
from kernels.recurrent import native
from kernels.recurrent.conv import conv_step
from kernels.recurrent.delta import folded, gated_delta_chunk, gated_delta_step, unit
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
    assert native.takes_step(*(t[:, :1] for t in tokens[:3]), state)
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
    assert not native.takes_step(*tokens[:3], state)
    where = torch.zeros(1, dtype=torch.long), torch.arange(3)[None]
    found = gated_delta_step(*tokens, state, ring_of((2, 1, 8, 8)), *where, "native")
    assert off(found, loop(*tokens, state)[0]) < 5e-6
    long = torch.zeros(1, 9, 2, 16)
    assert not native.takes_step(long, long, long, torch.zeros(1, 2, 16, 16))
    assert native.takes_step(*(long[:, :8],) * 3, torch.zeros(1, 2, 16, 16))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 7, 63, 64, 65, 128, 131, 200])
def test_a_prompt_is_the_loop_over_its_tokens(count, shape, threads):
    given = inputs(count, shape, batch=2)
    out, deltas, states = loop(*given)
    assert native.takes_chunk(*given[:3], given[-1])
    before = given[-1].clone()
    for keep in {0, 1, min(count, 8), min(count, 66), count}:
        found, state, tail = gated_delta_chunk(*given, keep, "native")
        assert off(found, out) < 5e-6
        assert off(state, states[count - keep]) < 5e-6
        assert [part.shape[2] for part in tail] == [keep] * 3
        if keep:
            assert off(tail.deltas.transpose(1, 2), deltas[:, count - keep :]) < 5e-6
            assert torch.equal(tail.decays.transpose(1, 2), given[3][:, count - keep :])
            assert off(tail.keys.transpose(1, 2), unit(given[1])[:, count - keep :]) < 1e-6
        assert torch.equal(given[-1], before)


@pytest.mark.parametrize("decay", [0.02, 60.0])
def test_slow_and_fast_decays_are_as_near_as_the_recurrent_form(decay):
    """Slow ones have the most to cancel, fast ones leave nothing of S: exp(p) is 0 then."""
    given = inputs(320, SHAPES[1], decay=decay)
    out, _, states = loop(*given)
    native_form, plain = (gated_delta_chunk(*given, 0, name) for name in ("native", "reference"))
    for wanted, found, other in zip((out, states[-1]), native_form, plain):
        assert off(found, wanted) < 8 * off(other, wanted) < 1e-5


@pytest.mark.parametrize("channels", [1, 15, 16, 17, 64, 101])
@pytest.mark.parametrize("taps", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_convolution_is_the_references(channels, taps, dtype):
    draw = torch.Generator().manual_seed(channels)
    x = torch.randn(2, 40, 2 * channels, generator=draw).to(dtype)[..., :channels]
    weight = torch.randn(channels, taps, generator=draw).to(dtype)
    bias = torch.randn(channels, generator=draw).to(dtype) if channels % 2 else None
    rings = torch.full((2, 2, RING, channels), 9.0, dtype=dtype).unbind()
    assert native.takes_conv(x, rings[0], weight)
    results: list[list[torch.Tensor]] = [[], []]
    at = 0
    for width in (1, 3, 8, 1, 2, 8, 8, 1, 7, 1):
        positions = torch.arange(at, at + width).expand(2, -1)
        for ring, backend, parts in zip(rings, ("native", "reference"), results):
            given = x[:, at : at + width], ring, positions, weight, backend, bias
            parts.append(conv_step(*given))
        assert torch.equal(*rings)
        at += width
    wide = torch.cat([torch.zeros(2, taps - 1, channels), x], 1).double()
    wanted = sum(wide[:, tap : tap + 40] * weight[:, tap].double() for tap in range(taps))
    wanted = wanted + (0 if bias is None else bias.double())
    wanted = wanted * torch.sigmoid(wanted)
    found, plain = (off(torch.cat(parts, 1).double(), wanted) for parts in results)
    assert found <= 2 * plain + 1e-8
