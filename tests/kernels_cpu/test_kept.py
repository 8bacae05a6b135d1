"""A step over kept rows in one call: the row is written, its query attends, what it weighs is left.

Stops: a row beside the one that is free written, rows beyond those held read (they hold NaN), a
sink met at another distance, a row outside of the window seen, weights that miss the sinks.
"""

import ctypes
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.native import SPLIT
from kernels.attention.ragged import decode_ragged
from kernels.kept import step as kept
from kernels.kept.step import (
    UNSEEN,
    Store,
    Turned,
    kept_step,
    kept_step_ragged,
    kept_step_ref,
    steps,
)
from kernels.launch.softmax import PLAIN, Softmax
from kernels.native.library import missing
from tests.kernels.support.kernel_checks import ORDERS, assert_close, assert_scores, worst
from tests.kernels.support.ragged_checks import flat_store

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HELD = st.sampled_from([0, 1, 2, 14, 15, 16, 17, 31, 100, 254, 255, 256, 257, 509, 1021])


@pytest.fixture(scope="module", autouse=True)
def compiled():
    assert steps("auto", torch.float32, torch.float32, 64, "cpu"), kept._BINDING.fault


def a_step(heads, group, held, dim, dtype, kinds=None, seed=0):
    """q, the new rows, and a Store in which rows that do not count are NaN."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size):
        return torch.randn(*size, generator=generator).to(dtype)

    q, (new_k, new_v) = draw(1, 1, heads * group, dim), draw(2, heads, 1, dim)
    k, v = draw(2, heads, held + 5, dim)
    k[:, held:] = v[:, held:] = math.nan
    order = torch.cat([torch.arange(4), 4 + torch.randperm(held + 1, generator=generator)])
    positions = (order[: held + 5] * 3).int().expand(heads, -1).clone()
    scores = None
    if kinds is not None:
        scores = torch.rand(heads, kinds, held + 5, generator=generator)
    return q, new_k, new_v, Store(k, v, positions, scores, held)


def copied(store, dtype=None):
    k, v = (t.clone() if dtype is None else t.to(dtype) for t in store[:2])
    scores = None if store.scores is None else store.scores.clone()
    return Store(k, v, store.positions.clone(), scores, store.held)


def turned_dims(given, turned, shift):
    """The same step with the elements of a head in another order: pairs stay pairs."""
    q, new_k, new_v, store = given
    size = 0 if turned is None or turned.cos is None else turned.cos.shape[1]
    inside, rest = torch.arange(size).roll(shift), torch.arange(2 * size, q.shape[3]).roll(shift)
    order = torch.cat([inside, inside + size, rest])
    if size:
        turned = turned._replace(cos=turned.cos[:, inside], sin=turned.sin[:, inside])
    store = copied(store)._replace(k=store.k[..., order].contiguous())
    return (q[..., order], new_k[..., order], new_v, store), turned


def check(given, at, softmax=PLAIN, leaves="", turned=None):
    """One call against float64: out, what is left, and the store to the bit."""
    q, new_k, new_v, before = given
    scale, mine, theirs = q.shape[3] ** -0.5, copied(before), copied(before)
    out, left = kept_step(q, new_k, new_v, mine, at, scale, softmax, leaves, turned)
    kept_step_ref(q, new_k, new_v, theirs, at, scale, softmax, leaves, turned)
    for found, expected in zip(mine[:4], theirs[:4]):
        if found is not None:
            assert torch.equal(found.nan_to_num(7), expected.nan_to_num(7))
    wide = (t.double() for t in (q, new_k, new_v)), copied(before, torch.float64)
    exact = kept_step_ref(*wide[0], wide[1], at, scale, softmax, leaves, turned)
    rough = []
    for shift in range(ORDERS):
        some, by = turned_dims(given, turned, shift)
        rough.append(kept_step_ref(*some, at, scale, softmax, leaves, by))
    result = worst(exact[0], [r[0] for r in rough])
    assert out.dtype == q.dtype and torch.isfinite(out).all()
    assert_close(out, exact[0], result, q.dtype, "out")
    if leaves:
        most = worst(exact[1], [r[1] for r in rough])
        if leaves == "logits":
            assert_close(left, exact[1], most, torch.float32, leaves)
        else:
            assert_scores(left, exact[1], most, leaves)
    return out, left


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    heads=st.sampled_from([1, 2, 3]),
    group=st.sampled_from([1, 3, 4, 8]),
    held=HELD,
    dim=st.sampled_from([16, 64, 80, 128]),
    dtype=st.sampled_from(DTYPES),
    leaves=st.sampled_from(["", "logits", "weights"]),
    softmax=st.sampled_from(["", "cap", "sinks", "both"]),
    kinds=st.sampled_from([None, 1, 2, 4]),
)
def test_a_step_against_float64(heads, group, held, dim, dtype, leaves, softmax, kinds):
    cap = 2.0 if softmax in ("cap", "both") else 0.0
    sinks = torch.linspace(-2, 2, heads * group) if softmax in ("sinks", "both") else None
    given = a_step(heads, group, held, dim, dtype, kinds, held)
    check(given, 5000, Softmax(cap, sinks), leaves)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    group=st.sampled_from([1, 4, 8]),
    held=st.sampled_from([5, 15, 16, 17, 255, 256, 257, 509]),
    dim=st.sampled_from([16, 64, 80]),
    pairs=st.sampled_from(["half", "part"]),
    dtype=st.sampled_from(DTYPES),
    first=st.sampled_from([0, 1, 3, 4]),
    each=st.booleans(),
    oldest=st.sampled_from(["none", "one", "all but itself"]),
    softmax=st.sampled_from([PLAIN, Softmax(3.0)]),
)
def test_a_window_s_step_against_float64(
    group, held, dim, pairs, dtype, first, each, oldest, softmax
):
    given = a_step(2, group, held, dim, dtype, seed=held)
    at, positions = 3 * (held + 5), given[3].positions[0, first:held]
    low = {"none": UNSEEN, "one": int(positions.min()) + 1, "all but itself": at}[oldest]
    size = dim // 2 if pairs == "half" else dim // 4 - 1
    angles = torch.linspace(0, 9, (first if each else 1) * size).view(-1, size)
    turned = Turned(first, low, None, None)
    if first:
        turned = turned._replace(cos=angles.cos(), sin=angles.sin())
    check(given, at, softmax, "", turned)


@pytest.mark.parametrize("held", [SPLIT - 2, SPLIT - 1, SPLIT, 2 * SPLIT + 3])
def test_more_rows_than_one_part_has(held):
    check(a_step(2, 2, held, 32, torch.float32), 99999, leaves="weights")


def test_the_first_rows_unturned_are_rows_like_others():
    given = a_step(2, 4, 100, 64, torch.float32)
    plain = kept_step(*given[:3], copied(given[3]), 900, 0.125)[0]
    still = Turned(4, UNSEEN, torch.ones(1, 32), torch.zeros(1, 32))
    found = kept_step(*given[:3], copied(given[3]), 900, 0.125, turned=still)[0]
    torch.testing.assert_close(found, plain, atol=1e-6, rtol=0)
    other = Turned(4, UNSEEN, -torch.ones(1, 32), torch.zeros(1, 32))
    assert (kept_step(*given[:3], copied(given[3]), 900, 0.125, turned=other)[0] != plain).any()


def test_views_with_strides_and_a_query_that_is_one():
    q, new_k, new_v, store = a_step(3, 2, 40, 64, torch.float32, 2)
    expected = kept_step(q, new_k, new_v, copied(store), 900, 0.125, leaves="weights")
    wide = torch.full((3, 50, 2, 64), math.nan)
    wide[:, :45, 0], wide[:, :45, 1] = store.k, store.v
    scores = torch.zeros(3, 4, 60)
    mine = Store(wide[:, :, 0], wide[:, :, 1], store.positions, scores[:, ::2], 40)
    news = torch.stack([new_k, new_v], 1)
    queries = torch.zeros(1, 1, 6, 128)
    queries[..., :64] = q
    given = queries[..., :64], news[:, 0], news[:, 1], mine, 900, 0.125
    found = kept_step(*given, leaves="weights")
    assert all(torch.equal(one, other) for one, other in zip(found, expected))
    assert torch.equal(wide[:, 40, 0], new_k[:, 0]) and torch.equal(wide[:, 40, 1], new_v[:, 0])
    assert wide[:, 41:45].isnan().all()


def test_results_do_not_depend_on_threads():
    given, before, found = (
        a_step(3, 4, 3 * SPLIT + 5, 64, torch.bfloat16),
        torch.get_num_threads(),
        [],
    )
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(kept_step(*given[:3], copied(given[3]), 9, 0.125, leaves="weights"))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[1, 1], [300, 2, 257], [16, SPLIT + 3], [17]])
def test_heads_of_different_counts_are_the_two_steps_that_it_replaces_to_the_bit(counts, dtype):
    k, v, starts, lengths = flat_store(counts, 64, dtype, "cpu", torch.Generator().manual_seed(1))
    table = torch.stack([starts, lengths, starts + lengths - 1])
    positions = torch.full((len(k),), -7, dtype=torch.int32)
    q = torch.randn(1, 1, 4 * len(counts), 64).to(dtype)
    new_k, new_v = torch.randn(2, len(counts), 1, 64).to(dtype)
    mine, theirs = (k.clone(), v.clone()), (k, v)
    for side, new in zip(theirs, (new_k, new_v)):
        side[table[2]] = new[:, 0]
    expected = decode_ragged(q, *theirs, starts, lengths, max(counts), 0.125)
    rows = *mine, positions, table, max(counts), 77, 0.125
    assert torch.equal(kept_step_ragged(q, new_k, new_v, *rows), expected)
    for one, other in zip(mine, theirs):
        assert torch.equal(one.nan_to_num(5), other.nan_to_num(5))
    assert (positions == 77).nonzero().flatten().tolist() == sorted(table[2].tolist())


def test_a_store_without_room_is_named():
    given = a_step(1, 1, 3, 16, torch.float32)
    full = given[3]._replace(held=8)
    with pytest.raises(ValueError, match="found 8 rows held of 8, expected room"):
        kept_step(*given[:3], full, 9, 0.1)


def test_which_calls_the_kernel_takes():
    alike = torch.float32, torch.float32, 64, "cpu"
    assert steps("auto", *alike) and steps("native", *alike)
    assert not steps("reference", *alike) and not steps("cpu", *alike)
    assert not steps("auto", torch.float32, torch.int8, 64, "cpu")
    assert not steps("auto", torch.bfloat16, torch.float32, 64, "cpu")
    assert not steps("auto", torch.float32, torch.float32, 24, "cpu")
    assert not steps("auto", *alike[:3], "cuda")
    assert ctypes.sizeof(kept._Step) == kept.loaded().omnikv_sizeof_kept()
