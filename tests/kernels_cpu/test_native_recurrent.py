"""A recurrent layer's step in C++ against the float64 loop over tokens."""

import itertools

import pytest
import torch

from kernels.native.library import missing
from kernels.recurrent import native, native_gates
from kernels.recurrent.conv import conv_chunk, conv_step
from kernels.recurrent.delta import folded, gated_delta_chunk, gated_delta_step, unit
from kernels.recurrent.gates import gated_norm
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
def test_a_prompt_is_the_loop_over_its_tokens(count, shape, set_threads):
    given = inputs(count, shape, batch=2)
    out, deltas, states = loop(*given)
    assert native.takes_chunk(*given[:3], given[-1])
    before = given[-1].clone()
    for threads, keep in itertools.product((1, 2), {0, 1, min(count, 8), min(count, 66), count}):
        set_threads(threads)
        found, state, tail = gated_delta_chunk(*given, keep, "native")
        assert off(found, out) < 5e-6
        assert off(state, states[count - keep]) < 5e-6
        assert [part.shape[2] for part in tail] == [keep] * 3
        if keep:
            assert off(tail.deltas.transpose(1, 2), deltas[:, count - keep :]) < 5e-6
            assert torch.equal(tail.decays.transpose(1, 2), given[3][:, count - keep :])
            assert off(tail.keys.transpose(1, 2), unit(given[1])[:, count - keep :]) < 1e-6
        assert torch.equal(given[-1], before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [*SHAPES[1:], (1, 2, 64, 16), (2, 1, 2, 32), (1, 8, 48, 64)])
def test_a_prompt_of_any_dtype_is_as_near_as_torchs(shape, dtype):
    """q, k and v are parts of one row. Keys of 16 bits are multiplied as they are stored where they
    are pairs and no wider than values: odd ones and wider ones are not.
    """
    heads, group, dk, dv = shape
    for count in (*range(1, 9), 31, 32, 33, 61, 64, 97, 130):
        q, k, v, g, beta, state = inputs(count, shape, batch=2, seed=count)
        rows = torch.cat([t.flatten(2) for t in (q, k, v)], 2).to(dtype)
        parts = rows.split([heads * dk, heads * dk, heads * group * dv], 2)
        tokens = [part.unflatten(2, (-1, d)) for part, d in zip(parts, (dk, dk, dv))]
        given = *tokens, g, beta, state
        assert native.takes_chunk(*tokens, state)
        out, deltas, states = loop(*given)
        keep = count // 3
        mine, plain = (gated_delta_chunk(*given, keep, name) for name in ("native", "cpu"))
        pairs = [(out, mine[0], plain[0]), (states[count - keep], mine[1], plain[1])]
        if keep:
            wanted = deltas[:, count - keep :].transpose(1, 2)
            pairs.append((wanted, mine[2].deltas, plain[2].deltas))
        for wanted, found, other in pairs:
            assert off(found, wanted) <= 2 * off(other, wanted) + 2e-7


def test_a_key_that_is_not_finite_stays_in_its_heads_of_a_prompt():
    q, k, v, g, beta, state = inputs(40, SHAPES[3])
    for dtype in (torch.float32, torch.bfloat16):
        tokens = [t.to(dtype) for t in (q, k, v)]
        before, _, _ = gated_delta_chunk(*tokens, g, beta, state, 0, "native")
        tokens[1][0, 20, 0, 5] = float("nan")
        found, _, _ = gated_delta_chunk(*tokens, g, beta, state, 0, "native")
        assert torch.equal(found[:, :, 2:], before[:, :, 2:])
        assert found[:, 20:, :2].isnan().all()


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


FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def convolved(x, before, weight, bias):
    """The convolution and silu in float64, token by token."""
    wide, taps = torch.cat([before, x], 1).double(), weight.shape[1]
    out = []
    for i in range(x.shape[1]):
        one = (wide[:, i : i + taps].mT * weight.double()).sum(-1)
        out.append(one if bias is None else one + bias.double())
    y = torch.stack(out, 1)
    return y * torch.sigmoid(y)


def prompt(count, channels, taps, dtype, batch=2, scale=1.0):
    """(x, before, weight, bias): x is part of wider rows, as a projection leaves it."""
    draw = torch.Generator().manual_seed(count + channels + taps)
    rows = torch.randn(batch, taps - 1 + count, channels + 24, generator=draw) * scale
    weight = torch.randn(channels, taps, generator=draw).to(dtype)
    bias = torch.randn(channels, generator=draw).to(dtype) if count % 2 else None
    rows = rows.to(dtype)[..., 8 : channels + 8]
    return rows[:, taps - 1 :], rows[:, : taps - 1].contiguous(), weight, bias


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("count", [*range(1, 18), 31, 61, 64, 65, 127])
def test_a_prompts_convolution_is_as_near_as_torchs(count, dtype, threads):
    """Channels below, at and above a block's; against the loop in float64."""
    for channels, taps in ((3, 2), (16, 4), (101, 4), (1040, 4), (40, 8), (33, 1)):
        x, before, weight, bias = prompt(count, channels, taps, dtype)
        assert native.takes_conv(x, before, weight)
        wanted = convolved(x, before, weight, bias)
        found = conv_chunk(x, before, weight, "native", bias)
        # two threads of torch's float16 convolution take 20 s beside a busy process, one 10 ms
        torch.set_num_threads(1)
        plain = conv_chunk(x, before, weight, "cpu", bias)
        torch.set_num_threads(threads)
        assert found.dtype == dtype and found.is_contiguous()
        assert off(found.double(), wanted) <= 2 * off(plain.double(), wanted) + 1e-7


@pytest.mark.parametrize("dtype", FLOATS)
def test_parts_of_a_prompt_have_the_bits_of_the_whole(dtype):
    """What one part leaves is what the next begins with, and steps in a ring say the same."""
    x, before, weight, bias = prompt(97, 70, 4, dtype)
    whole = conv_chunk(x, before, weight, "native", bias)
    wide, at, parts = torch.cat([before, x], 1), 0, []
    for width in (1, 2, 3, 4, 1, 13, 73):
        held = wide[:, at : at + 3].contiguous()
        parts.append(conv_chunk(x[:, at : at + width], held, weight, "native", bias))
        at += width
    assert at == 97 and torch.equal(torch.cat(parts, 1), whole)
    ring = torch.zeros(2, RING, 70, dtype=dtype)
    ring[:, 7:10] = before
    steps = []
    for i in range(97):
        position = torch.full((2, 1), 10 + i)
        steps.append(conv_step(x[:, i : i + 1], ring, position, weight, "native", bias))
    assert torch.equal(torch.cat(steps, 1), whole)


@pytest.mark.parametrize("dtype", FLOATS)
def test_large_inputs_and_what_is_not_finite_stay_in_their_channel(dtype):
    """silu of what is far below 0 is 0: exp(-x) has no float32 there."""
    x, before, weight, _ = prompt(9, 20, 4, dtype, scale=100.0)
    wanted = convolved(x, before, weight, None)
    assert float(wanted.min()) > -1 and float((wanted.abs() < 1e-38).double().mean()) > 0.1
    found = conv_chunk(x, before, weight, "native")
    plain = conv_chunk(x, before, weight, "cpu")
    assert off(found.double(), wanted) <= 2 * off(plain.double(), wanted) + 1e-7
    x = x.clone()
    x[0, 4, 11] = float("nan")
    bad = conv_chunk(x, before, weight, "native").isnan().nonzero().tolist()
    assert bad == [[0, i, 11] for i in range(4, 8)]


def test_a_convolution_that_it_does_not_take_runs_on_torch():
    x, before, weight, _ = prompt(5, 12, 9, torch.float32)
    assert not native.takes_conv(x, before, weight)
    assert off(conv_chunk(x, before, weight), convolved(x, before, weight, None)) < 1e-6
    x, before, weight, _ = prompt(5, 12, 4, torch.bfloat16)
    assert not native.takes_conv(x, before.float(), weight)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [1, 15, 16, 17, 64, 101, 128])
def test_the_gated_norm_is_as_near_as_torchs(size, dtype, threads):
    """A weight in z's dtype, and one in float32; z is part of wider rows."""
    draw = torch.Generator().manual_seed(size)
    for count in (1, 2, 37):
        out = torch.randn(2, count, 3, size, generator=draw) * 4
        wide = (torch.randn(2, count, 5 + 3 * size, generator=draw) * 30).to(dtype)
        z, weight = wide[..., 5:].unflatten(2, (3, size)), torch.randn(size, generator=draw)
        for scale in (weight, weight.to(dtype)):
            assert native_gates.takes_norm(out, z, scale)
            found, plain = (gated_norm(out, z, scale, 1e-6, name) for name in ("native", "cpu"))
            value, gate = out.to(dtype).double(), z.double()
            normed = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + 1e-6)
            wanted = scale.double() * normed * gate * torch.sigmoid(gate)
            assert found.dtype == dtype and found.shape == out.shape
            assert off(found.double(), wanted) <= 2 * off(plain.double(), wanted) + 1e-7


def test_a_gated_norm_of_other_dtypes_runs_on_torch():
    out, z = torch.randn(1, 2, 3, 16), torch.randn(1, 2, 3, 16).bfloat16()
    weight = torch.randn(16)
    assert not native_gates.takes_norm(out, z, weight.half())
    assert not native_gates.takes_norm(out.double(), z, weight)
    assert not native_gates.takes_norm(out.transpose(1, 2), z.transpose(1, 2), weight)
