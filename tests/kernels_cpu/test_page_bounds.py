"""The choice of pages in one call: extremes to the bit, bounds against float64, and the pages that
those bounds say; attention to pages against attention to their rows.

Stops: a page that is not whole taken for one, extremes of rows that are not there (they hold NaN)
or that are stale, a channel whose sign picks the wrong extreme, the newest page chosen.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.native import attend
from kernels.native.library import missing
from kernels.select import page_bounds as pages_of
from kernels.select.drop import RULES
from kernels.select.page_bounds import choose_pages, chooses, page_bounds
from kernels.select.topk import select_topk_ref
from tests.kernels.support.kernel_checks import ORDERS, assert_close, worst

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [1, 2, 15, 16, 17, 31, 32, 33, 255, 256, 257, 509, 1031]


@pytest.fixture(scope="module", autouse=True)
def compiled():
    some = torch.zeros(1, 1, 16)
    assert chooses("auto", some, some.dtype), pages_of._BINDING.fault
    assert not chooses("cpu", some, some.dtype) and not chooses("auto", some, torch.float16)
    assert not chooses("auto", torch.zeros(1, 1, 24), torch.float32)


def run(q, k, known, length, size, wanted, how, low=None, high=None):
    """(low, high, bounds, pages, counts) of one call; what it need not write holds 99."""
    heads, dim, most = len(k), k.shape[2], -(-k.shape[1] // size)
    if low is None:
        low, high = torch.full((2, heads, most, dim), 99.0, dtype=k.dtype)
    bounds = torch.full((heads, most), 99.0)
    pages = torch.full((heads, wanted + 2), 99, dtype=torch.int32)
    counts = torch.full((heads,), 99, dtype=torch.int32)
    choose_pages(q, k, low, high, bounds, pages, counts, known, length, size, wanted, how)
    return low, high, bounds, pages, counts


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 4, 7, 8]),
    length=st.sampled_from(LENGTHS),
    size=st.sampled_from([1, 4, 16, 17]),
    dim=st.sampled_from([16, 64, 80]),
    dtype=st.sampled_from(DTYPES),
    how=st.sampled_from(RULES),
    wanted=st.sampled_from([1, 2, 7, 31]),
)
def test_against_float64(heads, group, length, size, dim, dtype, how, wanted):
    generator = torch.Generator().manual_seed(length * size)
    q = torch.randn(heads * group, dim, generator=generator).to(dtype)
    k = torch.randn(heads, length + 20, dim, generator=generator).to(dtype)
    k[:, length:] = math.nan
    low, high, bounds, pages, counts = run(q, k, 0, length, size, wanted, how)
    older = (length - 1) // size
    for page in range(older + 1):
        rows = k[:, page * size : min((page + 1) * size, length)]
        assert torch.equal(low[:, page], rows.amin(1))
        assert torch.equal(high[:, page], rows.amax(1))
    assert (low[:, older + 1 :] == 99).all() and (bounds[:, older:] == 99).all()
    if older:
        extremes = low[:, :older], high[:, :older]
        exact = page_bounds(q.double(), *(t.double() for t in extremes), how)
        rough = [
            page_bounds(*(t.roll(shift, -1) for t in (q, *extremes)), how)
            for shift in range(ORDERS)
        ]
        found = bounds[:, :older]
        assert_close(found, exact, worst(exact, rough), torch.float32, "bounds")
    right, kept = torch.empty_like(pages), torch.empty_like(counts)
    ends = (torch.full_like(counts, n) for n in (0, older, wanted))
    select_topk_ref(bounds, *ends, right, kept)
    assert torch.equal(pages, right) and torch.equal(counts, kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_extremes_follow_the_rows_from_those_that_are_known_on(dtype):
    """Forwards row by row, and back: pages below stay as they were, wrong ones too."""
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(4, 64, generator=generator).to(dtype)
    k = torch.randn(2, 100, 64, generator=generator).to(dtype)
    low, high, *_ = run(q, k, 0, 40, 16, 3, "max")
    for known, length in ((40, 41), (41, 48), (48, 49), (49, 97), (60, 61), (61, 70)):
        run(q, k, known, length, 16, 3, "max", low, high)
        fresh = run(q, k, 0, length, 16, 3, "max")
        seen = (length - 1) // 16 + 1
        assert torch.equal(low[:, :seen], fresh[0][:, :seen])
        assert torch.equal(high[:, :seen], fresh[1][:, :seen])
    low[:, 1] = 55
    run(q, k, 70, 71, 16, 3, "max", low, high)
    assert (low[:, 1] == 55).all()


def test_views_threads_and_what_is_not_a_number():
    generator, found = torch.Generator().manual_seed(2), []
    q = torch.randn(8, 64, generator=generator)
    wide = torch.randn(2, 70000, 2, 64, generator=generator)
    wide[1, 5, 0, 3] = math.nan
    before = torch.get_num_threads()
    try:
        for threads, k in ((1, wide[:, :, 0].contiguous()), (2, wide[:, :, 0])):
            torch.set_num_threads(threads)
            found.append(run(q, k, 0, 70000, 16, 9, "sum"))
    finally:
        torch.set_num_threads(before)
    for one, other in zip(*found):
        assert torch.equal(one.nan_to_num(3), other.nan_to_num(3))
    low, _, bounds, pages, _ = found[0]
    assert low[1, 0].isnan().nonzero().flatten().tolist() == [3]
    assert bounds[1, 0].isnan() and not bounds[0].isnan().any() and 0 not in pages[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("unit", [2, 3, 16])
@pytest.mark.parametrize("heads", [1, 2, 8])
def test_attention_to_pages_is_attention_to_their_rows(heads, unit, dtype):
    """A list for all, for each K/V head and for each query head; with a tail, over block ends."""
    generator = torch.Generator().manual_seed(unit)
    q = torch.randn(1, 8, 64, generator=generator).to(dtype)
    k, v = torch.randn(2, 2, 1500, 64, generator=generator).to(dtype)
    pages = torch.stack([torch.randperm(80, generator=generator)[:50] for _ in range(heads)])
    pages = pages.sort(1).values.int()
    inside = torch.arange(unit, dtype=torch.int32)
    rows = (pages.unsqueeze(2) * unit + inside).flatten(1)
    given = 50 * unit, 1350
    found = attend(q, k, v, 0.125, pages, *given, unit=unit)
    expected = attend(q, k, v, 0.125, rows, *given)
    assert all(torch.equal(one, other) for one, other in zip(found, expected))
