"""A prompt's queries in 8 bits that meet int8 rows, against float64 over queries rounded alike,
under every instruction set that this machine can run; where it multiplies no bytes, those of 16.

Stops: bytes that saturate, the start of a sum that is another row's, elements behind a head that
is no multiple of 64, weights beyond the largest whole number, a mask or a scale of a neighbour.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.launch.softmax import PLAIN, Softmax
from kernels.native import library
from kernels.prefill.dense import prefill_dense
from kernels.prefill.native import attend_prompt, rounds_queries
from kernels.prefill.sparse import prefill_sparse
from kernels.prefill.window import prefill_window
from kernels.rows.forms import FORMS, floats, stored_key_floats
from kernels.rows.native import stored_queries
from tests.kernels.support.kernel_checks import EPSILON, plain
from tests.kernels.support.packed_rows import scales_of
from tests.kernels_cpu.test_native_prompt_rows import compiled, drawn  # noqa: F401

pytestmark = pytest.mark.skipif(bool(library.missing()), reason=library.missing())
FORM, BYTES = FORMS[torch.int8], Softmax(query_bits=8)


def rounded(q, k):
    """Queries as rows of K meet them, in whole numbers up to 127 of a scale each: float64."""
    turned = stored_queries(q.float(), k)
    top = turned.abs().amax(-1, keepdim=True)
    inverse = torch.where(top > 0, torch.full_like(top, 127) / top, 0.0)
    return (turned * inverse).round().double() * top.double() / 127


def exact(q, k, v, visible, scale):
    """Attention of float64 by such queries to rows as they were rounded: out, logits [Q, H, n]."""
    return plain(rounded(q, k), stored_key_floats(k), floats(v), visible, scale, torch.float64)


def packed(seed, kv_heads, n, dim):
    rows = drawn(seed, 2, kv_heads, n, dim)
    rows[:, :, n // 2] *= 20  # one outlier
    rows[1, :, n // 3] = 0
    return FORM.keys.pack(rows[0]), FORM.values.pack(rows[1])


def agrees(q, k, v, scale, past, found, lse):
    """Whether a result is that of rounded queries, but for the rounding of weights and of `found`:
    a weight is off by half of 1/32767 of its block's largest.
    """
    visible = list(range(past + 1, past + 1 + len(q)))
    expected, logits = exact(q, k, v, visible, scale)
    largest = logits[logits.isfinite()].abs().max().item()
    error = (found.double() - expected).abs().max()
    allowed = EPSILON[found.dtype] * expected.abs().max() + 2**-11 * floats(v).abs().max()
    assert error <= allowed * (1 + 1e-5 * largest)
    assert torch.allclose(lse.double(), logits.logsumexp(-1), atol=1e-5 * (1 + largest), rtol=1e-5)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    chunk=st.sampled_from([1, 5, 6, 31, 97]),
    past=st.sampled_from([0, 1, 15, 125, 255, 256, 257, 800]),
    group=st.sampled_from([1, 3, 4, 8]),
    dim=st.sampled_from([16, 48, 64, 80, 128, 240, 256]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    size=st.sampled_from([1.0, 30.0, 1e-4, 3e3]),
    seed=st.integers(0, 99),
)
def test_queries_are_rounded_and_nothing_else(compiled, chunk, past, group, dim, dtype, size, seed):  # noqa: F811
    k, v = packed(seed, 2, past + chunk, dim)
    q = (drawn(seed + 1, chunk, 2 * group, dim) * size).to(dtype)
    found, lse = attend_prompt(q, k, v, dim**-0.5, past, softmax=BYTES)
    assert found.dtype == dtype
    if rounds_queries(q, k, BYTES):
        agrees(q, k, v, dim**-0.5, past, found, lse)
    else:
        wide = attend_prompt(q, k, v, dim**-0.5, past)
        assert torch.equal(found, wide[0]) and torch.equal(lse, wide[1])


def test_this_machine_multiplies_bytes_where_it_says_so(compiled):  # noqa: F811
    """Queries whose 9th bit counts: what is rounded is seen, and only where it should be."""
    k, v = packed(1, 1, 300, 64)
    q = drawn(2, 9, 2, 64).bfloat16()
    narrow, wide = (attend_prompt(q, k, v, 1.0, 291, softmax=s)[0] for s in (BYTES, PLAIN))
    rounds = rounds_queries(q, k, BYTES)
    assert rounds == compiled.startswith(("avx512_vnni", "avx512_bf16"))
    assert torch.equal(narrow, wide) != rounds
    assert not rounds_queries(q, k, PLAIN) and not rounds_queries(q, k.float(), BYTES)
    # heads that are too wide keep their form
    k, v = packed(3, 1, 40, 272)
    q = drawn(4, 5, 1, 272).bfloat16()
    assert not rounds_queries(q, k, BYTES)
    pair = (attend_prompt(q, k, v, 0.1, 35, softmax=s)[0] for s in (BYTES, PLAIN))
    assert torch.equal(*pair)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dim", [16, 256])
def test_the_largest_numbers_do_not_saturate(compiled, sign, dim):  # noqa: F811
    k, v = (torch.zeros(1, 512, dim + 8, dtype=torch.int8) for _ in range(2))
    k[..., :dim], v[..., :dim] = 127 * sign, 127
    for side, rows in enumerate((k, v)):
        scales_of(rows, side)[:] = 1 / 127
    # every other row of K looks the other way
    k[:, ::2, :dim] *= -1
    q = stored_queries(torch.full((7, 2, dim), 3.0), k).bfloat16()  # all alike, once more turned
    found, lse = attend_prompt(q, k, v, 1 / dim, None, softmax=BYTES)
    expected, logits = exact(q, k, v, [512] * 7, 1 / dim)
    assert (found.double() - expected).abs().max() <= 2**-8
    assert (lse.double() - logits.logsumexp(-1)).abs().max() < 1e-3


def test_a_query_of_one_large_element_and_queries_of_nothing(compiled):  # noqa: F811
    k, v = packed(5, 2, 300, 64)
    q = drawn(6, 12, 4, 64) * 1e-3
    q[3, 1, 5], q[4], q[5, 2] = 50.0, 0.0, drawn(7, 64) * 1e-34
    for dtype in (torch.bfloat16, torch.float32):
        found, lse = attend_prompt(q.to(dtype), k, v, 0.125, 288, softmax=BYTES)
        if rounds_queries(q.to(dtype), k, BYTES):
            agrees(q.to(dtype), k, v, 0.125, 288, found, lse)
        assert found.isfinite().all()


def test_caps_windows_and_chosen_rows_see_what_they_should(compiled):  # noqa: F811
    k, v = packed(8, 2, 700, 64)
    q = (drawn(9, 40, 6, 64) * 2).bfloat16()
    index = torch.randperm(600, generator=torch.Generator().manual_seed(3))[:300].sort().values
    chosen = index.int()[None]
    for cap in (0.0, 5.0):
        for case in (dict(window=300), dict(index=chosen, kept=300, start=660), {}):
            given = q, k, v, 0.125, 660
            wide = attend_prompt(*given, softmax=Softmax(cap), **case)[0].float()
            found = attend_prompt(*given, softmax=Softmax(cap, query_bits=8), **case)[0].float()
            assert (found - wide).norm() <= 2e-2 * wide.norm()


def test_what_is_not_finite_shows_and_stays(compiled):  # noqa: F811
    k, v = packed(10, 1, 300, 64)
    q = drawn(11, 9, 2, 64).bfloat16()
    whole = attend_prompt(q, k, v, 0.125, 291, softmax=BYTES)[0]
    for bad in (math.nan, math.inf):
        spoilt = q.clone()
        spoilt[4, 1, 7] = bad
        found = attend_prompt(spoilt, k, v, 0.125, 291, softmax=BYTES)[0]
        assert not found[4, 1].isfinite().any()
        found[4, 1] = whole[4, 1]
        assert torch.equal(found, whole)
    for side in (0, 1):
        broken = [k.clone(), v.clone()]
        scales_of(broken[side], side)[0, 17] = math.nan
        found = attend_prompt(q, *broken, 0.125, 291, softmax=BYTES)[0]
        assert found.isnan().any(-1).all()


def test_results_do_not_depend_on_the_threads(compiled):  # noqa: F811
    k, v = packed(12, 2, 900, 64)
    q, before, found = drawn(13, 500, 6, 64).bfloat16(), torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(attend_prompt(q, k, v, 0.125, 400, softmax=BYTES)[0])
    torch.set_num_threads(before)
    assert torch.equal(*found)


def test_every_launcher_of_prompts_hands_it_on():
    k, v = (rows[None] for rows in packed(14, 2, 150, 64))
    q = drawn(15, 1, 50, 8, 64).bfloat16()
    index = torch.arange(0, 90, 3, dtype=torch.int32)[None, None]
    blocks = [(100, 150, 100, 30)]
    launchers = (
        lambda s: prefill_dense(q, k, v, 100, 0.125, softmax=s),
        lambda s: prefill_window(q, k, v, 100, 60, 0.125, softmax=s),
        lambda s: prefill_sparse(q, k, v, index, blocks, 100, 0.125, softmax=s),
    )
    for launch in launchers:
        narrow, wide = launch(BYTES), launch(PLAIN)
        assert torch.equal(narrow, wide) != rounds_queries(q, k, BYTES)
        assert (narrow - wide).float().norm() <= 3e-2 * wide.float().norm()


def test_another_number_of_bits_is_refused():
    with pytest.raises(ValueError, match="query_bits is 8 or 16, not 4"):
        Softmax(query_bits=4)
    assert BYTES.plain and not Softmax(5.0).plain
