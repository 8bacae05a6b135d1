"""The C++ attention where its own seams are: blocks of 256 rows, parts of 4,096, tiles of queries.

Stops: rows lost or counted twice at a seam, sums that depend on the number of threads, a stray
read, values that are not finite and vanish.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.dense import decode_dense
from kernels.attention.native import SPLIT, attend, attends
from kernels.attention.sparse import decode_sparse
from kernels.native.library import missing
from tests.kernels.support.kernel_checks import check_dense, check_sparse, ints

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SEAMS = [1, 15, 17, 255, 256, 257, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 3]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    length=st.sampled_from(SEAMS),
    group=st.sampled_from([1, 3, 4, 8]),
    queries=st.sampled_from([1, 2, 5, 8]),
    head_dim=st.sampled_from([16, 48, 64, 80, 256]),
    dtype=st.sampled_from(DTYPES),
    layout=st.sampled_from(["heads", "tokens"]),
    kind=st.sampled_from([None, "softmax", "raw"]),
)
def test_dense_at_seams(length, group, queries, head_dim, dtype, layout, kind):
    check_dense("cpu", "auto", [length], 1, group, queries, head_dim, dtype, layout, kind)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    count=st.sampled_from(SEAMS),
    tail=st.sampled_from([1, 255, 257]),
    group=st.sampled_from([1, 3, 8]),
    queries=st.sampled_from([1, 8]),
    dtype=st.sampled_from(DTYPES),
    per_head=st.booleans(),
)
def test_sparse_at_seams(count, tail, group, queries, dtype, per_head):
    check_sparse(
        "cpu", "auto", [count], [max(tail, queries)], 2, group, queries, 32, dtype, "heads",
        per_head,
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.tuples(*[st.sampled_from(SEAMS)] * 2), min_size=1, max_size=2),
    tail=st.sampled_from([1, 255]),
    group=st.sampled_from([1, 4, 8]),
    queries=st.sampled_from([1, 3]),
    dtype=st.sampled_from(DTYPES),
)
def test_heads_that_choose_different_counts(backend, counts, tail, group, queries, dtype):
    tails = [max(tail, queries)] * len(counts)
    shape = 2, group, queries, 32, dtype, "tokens"
    check_sparse("cpu", backend, [list(some) for some in counts], tails, *shape)


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    counts=st.lists(st.sampled_from(SEAMS), min_size=1, max_size=2),
    tail=st.sampled_from([1, 255]),
    group=st.sampled_from([1, 4, 8]),
    queries=st.sampled_from([1, 3]),
    dtype=st.sampled_from(DTYPES),
    per_head=st.booleans(),
)
def test_chosen_rows_that_count_several_times(
    backend, counts, tail, group, queries, dtype, per_head
):
    tails = [max(tail, queries)] * len(counts)
    shape = 2, group, queries, 32, dtype, "tokens", per_head
    check_sparse("cpu", backend, counts, tails, *shape, times=True)


def test_logs_that_do_not_fit_an_index_are_refused():
    q, k = torch.randn(1, 1, 4, 16), torch.randn(1, 2, 9, 16)
    index, one = torch.zeros(1, 2, 3, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    for counts, width in ((one, 2), (torch.ones(1, 2, dtype=torch.int32), 3)):
        with pytest.raises(ValueError, match=r"logs \(1, [23]\) beside an index \(1, 2, 3\)"):
            decode_sparse(q, k, k, index, counts, one, one, 0.25, logs=torch.zeros(1, width))


def test_counts_of_other_heads_are_refused():
    q, k = torch.randn(1, 1, 4, 16), torch.randn(1, 2, 9, 16)
    index, one = torch.zeros(1, 1, 3, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    counts = torch.ones(1, 2, dtype=torch.int32)
    with pytest.raises(ValueError, match="found counts of 2 heads beside an index of 1"):
        decode_sparse(q, k, k, index, counts, one, one, 0.25)


def test_results_do_not_depend_on_threads():
    k, v = torch.randn(2, 3, 3 * SPLIT + 5, 64).bfloat16()
    q, before, found = torch.randn(2, 12, 64).bfloat16(), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            logits = torch.empty(12 * k.shape[1])
            found.append((*attend(q, k, v, 0.125, logits=logits), logits))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other))


def test_dimensions_that_are_no_whole_vectors_are_left_to_torch():
    k = v = torch.randn(1, 9, 24)
    assert not attends(k, v, 24) and attends(k[..., :16], v[..., :16], 16)
    check_dense("cpu", "auto", [9, 300], head_dim=24, kind="softmax")


@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(what):
    """In K or V of a visible row; a row beyond the length is never read. A logit of -inf is a row
    that is not seen.
    """
    for side in (1,) if what == -math.inf else (0, 1):
        kv = torch.randn(2, 1, 2, 40, 32)
        kv[side, 0, 0, 7, 3] = what
        out = decode_dense(torch.ones(1, 1, 4, 32), *kv, ints([40], "cpu"), 0.2)
        assert not out[0, 0, :2].isfinite().all() and out[0, 0, 2:].isfinite().all()
        assert decode_dense(torch.ones(1, 1, 4, 32), *kv, ints([7], "cpu"), 0.2).isfinite().all()


def test_logits_far_apart_neither_overflow_nor_vanish():
    """Weights of e^-200 and less beside one of 1; the largest moves with each block, or not."""
    k = torch.zeros(1, 1, 900, 32)
    k[0, 0, :, 0] = torch.arange(900) * 200.0
    v = torch.randn(1, 1, 900, 32)
    for order in (slice(None), torch.arange(899, -1, -1)):
        out = decode_dense(
            torch.ones(1, 1, 1, 32), k[:, :, order], v[:, :, order], ints([900], "cpu"), 1.0
        )
        assert torch.allclose(out[0, 0, 0], v[0, 0, 899], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("kept", [1, 15, 16, 17, 257, SPLIT + 1])
def test_query_heads_read_rows_of_their_own(kept, group, dtype):
    heads, rows = 2 * group, 2 * kept + 5
    k, v = torch.randn(2, 2, rows, 64).to(dtype)
    q = torch.randn(1, heads, 64).to(dtype)
    index = torch.stack([torch.randperm(rows)[:kept].sort().values for _ in range(heads)]).int()
    logits = torch.empty(heads * kept)
    out, lse = attend(q, k, v, 0.125, index, kept, rows, logits)
    for head, chosen in enumerate(index.long()):
        some_k, some_v = (t[head // group, chosen].double() for t in (k, v))
        expected = some_k @ q[0, head].double() * 0.125
        assert (logits.view(heads, kept)[head] - expected).abs().max() < 2e-2
        torch.testing.assert_close(lse[0, head].double(), expected.logsumexp(0), atol=2e-2, rtol=0)
        weighed = expected.softmax(0) @ some_v
        close = 2e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(out[0, head].double(), weighed, atol=close, rtol=0)


def test_chosen_rows_are_read_where_they_lie(monkeypatch):
    monkeypatch.setattr(torch, "index_select", None)
    k, v = torch.randn(2, 1, 2, 500, 64)
    index = torch.arange(0, 400, 7, dtype=torch.int32).view(1, 1, -1)
    count = ints([index.shape[2]], "cpu")
    ends = ints([450], "cpu"), ints([500], "cpu")
    out = decode_sparse(torch.ones(1, 1, 4, 64), k, v, index, count, *ends, 0.1)
    assert out.isfinite().all()
