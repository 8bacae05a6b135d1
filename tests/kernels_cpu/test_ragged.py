"""Heads that hold different numbers of rows: all in one call, each against its rows alone.

Stops: a head that reads another's rows or the room between them, a part of the longest head taken
for one of a shorter, what an empty head leaves behind.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.dense import decode_dense
from kernels.attention.native import SPLIT
from kernels.attention.ragged import decode_ragged
from kernels.attention.scratch import ScratchShape, make_scratch
from kernels.rows.forms import FORMS
from tests.kernels.support.kernel_checks import ints
from tests.kernels.support.ragged_checks import check_ragged, flat_store

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
COUNTS = st.sampled_from([0, 1, 2, 15, 16, 17, 31, 101, 255, 256, 257, 509, 1021])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    counts=st.lists(COUNTS, min_size=1, max_size=5),
    group=st.sampled_from([1, 3, 4, 8]),
    head_dim=st.sampled_from([16, 24, 64, 80]),
    dtype=st.sampled_from(DTYPES),
    spare=st.sampled_from([0, 1, 300]),
    backend=st.sampled_from(["auto", "auto", "cpu", "reference"]),
    times=st.sampled_from([0, 1, 3, 30]),
)
def test_each_head_attends_to_its_own_rows(counts, group, head_dim, dtype, spare, backend, times):
    out = check_ragged("cpu", backend, counts, group, head_dim, dtype, spare, times=times)
    if times == 1:  # a row that counts once is a row, to the bit
        given = "cpu", backend, counts, group, head_dim, dtype, spare
        assert torch.equal(out, check_ragged(*given))


@pytest.mark.parametrize("most", [SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 3])
def test_a_head_of_several_parts_beside_heads_of_one(most):
    """And on a CPU without C++ the same, whose seams are elsewhere."""
    for backend in ("auto", "cpu"):
        check_ragged("cpu", backend, [7, most, 0, SPLIT], 2, 32)
        check_ragged("cpu", backend, [7, most, 0], 2, 32, times=3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_packed_rows(form, backend):
    for times in (0, 50):
        check_ragged("cpu", backend, [300, 1, 0, 27], 4, 64, form=form, times=times)


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
def test_one_row_for_a_million_is_their_softmax(backend):
    """Against the closed form: n equal rows beside one more; and a hidden row is not there."""
    q, k, v = torch.ones(1, 1, 2, 16), torch.zeros(3, 16), torch.zeros(3, 16)
    k[0], v[0], v[1], v[2] = 0.5, 1.0, 3.0, 7.0
    tables = torch.tensor([0]), torch.tensor([3])
    for n in (1, 2, 1_000_000):
        logs = torch.tensor([0.0, math.log(n), -math.inf])
        out = decode_ragged(q, k, v, *tables, 3, 0.25, backend=backend, logs=logs)
        most = math.exp(0.5 * 16 * 0.25)
        expected = (most + 3 * n) / (most + n)
        assert abs(out - expected).max() < 1e-6 * expected


def store(counts, dtype=torch.float32):
    return flat_store(counts, 64, dtype, "cpu", torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_call_is_a_call_for_each_head_to_the_bit(dtype):
    counts = [301, 17, 256, SPLIT + 9]
    k, v, starts, lengths = store(counts, dtype)
    q = torch.randn(1, 1, 16, 64).to(dtype)
    for backend in ("auto", "cpu", "reference"):
        out = decode_ragged(q, k, v, starts, lengths, max(counts), 0.125, backend=backend)
        for head, (first, n) in enumerate(zip(starts.tolist(), counts)):
            mine, rows = q[:, :, 4 * head : 4 * head + 4], (k[first:][:n], v[first:][:n])
            alone = decode_dense(
                mine, *(t[None, None] for t in rows), ints([n], "cpu"), 0.125, backend=backend
            )
            assert torch.equal(out[:, :, 4 * head : 4 * head + 4], alone)


def test_results_depend_neither_on_threads_nor_on_what_a_scratch_held():
    counts = [3 * SPLIT + 5, 300, 0, 1]
    k, v, starts, lengths = store(counts)
    q, before, found = torch.randn(1, 1, 16, 64), torch.get_num_threads(), []
    largest = ScratchShape(1, 1, 16, 4, 64, 4 * SPLIT)
    scratch = make_scratch(largest, "cpu")
    scratch.part.fill_(float("nan"))
    try:
        for threads, held in ((1, None), (2, scratch), (3, scratch)):
            torch.set_num_threads(threads)
            given = q, k, v, starts, lengths, max(counts), 0.125
            found.append(decode_ragged(*given, held))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_queries_that_are_a_view():
    k, v, starts, lengths = store([40, 9])
    wide = torch.randn(1, 1, 8, 128)
    given = k, v, starts, lengths, 40, 0.125
    expected = decode_ragged(wide[..., :64].contiguous(), *given)
    assert torch.equal(decode_ragged(wide[..., :64], *given), expected)


def test_tables_that_do_not_fit_are_named():
    k, v, starts, lengths = store([4, 9])
    q = torch.zeros(1, 1, 6, 64)
    with pytest.raises(ValueError, match="found 2 starts and 1 lengths under 6 query heads"):
        decode_ragged(q, k, v, starts, lengths[:1], 9, 0.1)
    with pytest.raises(ValueError, match="found 2 starts and 2 lengths under 5 query heads"):
        decode_ragged(q[:, :, :5], k, v, starts, lengths, 9, 0.1)
    with pytest.raises(ValueError, match=r"starts in torch.int32 .* expected torch.int64"):
        decode_ragged(q, k, v, starts.int(), lengths, 9, 0.1)
    for logs in (torch.zeros(len(k) - 1), torch.zeros(len(k), dtype=torch.float64)):
        with pytest.raises(ValueError, match=f"beside {len(k)} rows, expected torch.float32, one"):
            decode_ragged(q, k, v, starts, lengths, 9, 0.1, logs=logs)
