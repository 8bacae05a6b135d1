"""Attention at one distance: far keys turned back from where they stand, beside near ones.

Stops: angles that drift along a run or go on over a gap, a key that is turned by another's angle,
weights that are not of one softmax, rows beside those that are given (they hold NaN).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.native import SPLIT
from kernels.kept import far as far_rows
from kernels.kept.far import attend_far, attend_far_ref, meets_far
from kernels.native.library import missing
from tests.kernels.support.kernel_checks import ORDERS, assert_close, assert_scores, worst

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 15, 16, 17, 64, 65, 129, 257, 1021]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    some = torch.zeros(1, 1, 16)
    assert meets_far("auto", some), far_rows._BINDING.fault
    assert not meets_far("cpu", some) and not meets_far("auto", torch.zeros(1, 1, 24))
    assert not meets_far("auto", some.to(torch.int8))


def a_step(heads, group, dim, far, near, dtype, run=50, seed=0):
    """Rows of far blocks of `run` tokens with gaps between them, in a bank of NaN."""
    generator = torch.Generator().manual_seed(seed)
    q, distant = torch.randn(2, heads * group, dim, generator=generator)
    kv = torch.randn(4, heads, max(far, near) + 3, dim, generator=generator).to(dtype)
    kv[:2, :, far:] = kv[2:, :, near:] = math.nan
    each = torch.arange(far)
    at = each + each // run * 1000
    freq = 10000.0 ** -(torch.arange(dim // 2).double() / (dim // 2))
    rows = kv[0, :, :far], kv[1, :, :far], at, freq, kv[2, :, :near], kv[3, :, :near]
    return q.to(dtype), distant, *rows


def check(given):
    q, distant, far_k, far_v, at, freq, k, v = given
    scale, size = q.shape[1] ** -0.5, len(freq)
    out, received = attend_far(*given, scale)
    wide = [t.double() if t.is_floating_point() else t for t in given]
    exact = attend_far_ref(*wide, scale)
    rough = []
    for shift in range(ORDERS):
        inside, rest = torch.arange(size).roll(shift), torch.arange(2 * size, q.shape[1])
        order = torch.cat([inside, inside + size, rest.roll(shift)])
        mine = q[:, order], distant[:, order], far_k[..., order], far_v, at, freq[inside]
        rough.append(attend_far_ref(*mine, k[..., order], v, scale))
    plain = worst(exact[0], [r[0] for r in rough])
    # plain torch rounds the weights before it multiplies rows of 16 bits
    plain = plain if q.dtype == torch.float32 else plain.to(q.dtype)
    assert_close(out, exact[0], plain, q.dtype, "out")
    assert_scores(received, exact[1], worst(exact[1], [r[1] for r in rough]), "received")
    return out, received


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 4, 8]),
    dim=st.sampled_from([16, 64, 80, 128]),
    far=st.sampled_from([0, *SIZES]),
    near=st.sampled_from(SIZES),
    dtype=st.sampled_from(DTYPES),
    run=st.sampled_from([1, 50, 128, 2000]),
)
def test_against_float64(heads, group, dim, far, near, dtype, run):
    check(a_step(heads, group, dim, far, near, dtype, run, far + near))


def test_a_head_whose_end_does_not_turn_and_more_rows_than_a_part_has():
    given = list(a_step(2, 4, 64, 300, SPLIT + 3, torch.float32))
    given[5] = given[5][:20]
    check(given)


def test_far_away_angles_stay_right_along_a_long_run():
    given = list(a_step(1, 2, 64, 3000, 5, torch.float32, 5000))
    given[4] = given[4] + 2_000_000
    check(given)


def test_without_an_angle_far_rows_are_rows_like_others():
    q, _, far_k, far_v, at, freq, k, v = a_step(2, 4, 64, 70, 33, torch.float32)
    out, received = attend_far(q, q, far_k, far_v, 0 * at, freq, k, v, 0.125)
    both = torch.cat([far_k, k], 1), torch.cat([far_v, v], 1)
    folded = q.view(2, 4, 64)
    weights = (folded @ both[0].mT * 0.125).softmax(-1)
    torch.testing.assert_close(out, (weights @ both[1]).flatten(0, 1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(received, weights[..., 70:].flatten(0, 1), atol=1e-7, rtol=1e-5)
    other = attend_far(q, q, far_k, far_v, at, freq, k, v, 0.125)[0]
    assert not torch.allclose(other, out, atol=1e-2)


@pytest.mark.parametrize("far", [1, 17, 129, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_far_rows_where_they_lie_are_rows_in_turn_to_the_bit(far, dtype):
    q, distant, far_k, far_v, at, freq, k, v = a_step(2, 4, 64, far, 65, dtype)
    rows = torch.randperm(2 * far + 5, generator=torch.Generator().manual_seed(far))[:far]
    beside = [torch.full((2, 2 * far + 5, 64), math.nan, dtype=dtype) for _ in range(2)]
    for whole, part in zip(beside, (far_k, far_v)):
        whole[:, rows] = part
    expected = attend_far(q, distant, far_k, far_v, at, freq, k, v, 0.125)
    found = attend_far(q, distant, *beside, at, freq, k, v, 0.125, rows)
    reference = attend_far_ref(q, distant, *beside, at, freq, k, v, 0.125, rows)
    assert expected[0].isfinite().all() and reference[0].isfinite().all()
    assert all(torch.equal(one, two) for one, two in zip(found, expected))


def test_results_do_not_depend_on_threads():
    given, before, found = a_step(3, 2, 64, 700, 900, torch.bfloat16), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(attend_far(*given, 0.125))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other))
