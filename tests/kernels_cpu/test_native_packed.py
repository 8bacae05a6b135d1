"""Rows in few bits by the C++ kernels: packed to the bit as torch packs them, and attended to as
float64 attends to the rows as they were rounded.

Stops: a product and a sum in one rounding, a level or factor of another choice, a nibble or an
upper bit of another element, digits that overflow, a scale of a neighbour.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.dense import decode_dense
from kernels.attention.native import SPLIT, attend, attends
from kernels.native.library import missing
from kernels.rows import hadamard
from kernels.rows.forms import DTYPES, FORMS, floats, stored_key_floats
from tests.kernels.support import kernel_checks
from tests.kernels.support.kernel_checks import ints
from tests.kernels.support.packed_rows import over_packed_rows, scales_of
from tests.no_compiler import no_compiler

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
BANKS = st.sampled_from(list(DTYPES.values()))
SEAMS = [1, 3, 15, 17, 255, 256, 257, SPLIT - 1, SPLIT + 1]


def hostile_rows(dim, dtype, seed):
    """Zeros, subnormal and large rows, one element, half-way values, and elements far apart."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(300, dim, generator=generator)
    rows[0], rows[1], rows[2] = 0.0, rows[1] * 1e-40, rows[2] * 1e-38
    rows[3], rows[4], rows[5] = 1.0, torch.arange(dim) - dim / 2, rows[5] * 1e30
    rows[6], rows[6, dim // 3], rows[7, 0] = 0.0, -2.0, 1e4
    rows[8] = (torch.arange(dim) % 127 + 0.5) * 1.37
    rows[8, 0] = 127 * 1.37
    rows[10:100] *= torch.rand(90, dim, generator=generator).clamp_min(0.03) ** 4
    rows[100:200] = (rows[100:200] * 8).round() / 8
    rows = rows.to(dtype)
    return torch.where(rows.isfinite(), rows, 1.0)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    bank=BANKS,
    dim=st.sampled_from([16, 32, 48, 64, 96, 128, 160, 256, 1024]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_rows_are_packed_to_the_bit(bank, dim, dtype, seed):
    form, rows = FORMS[bank], hostile_rows(dim, dtype, seed)
    if dim % form.multiple or dim > form.most:
        return
    for side in (form.keys, form.values):
        found = side.pack(rows)
        with no_compiler():
            assert torch.equal(found.view(torch.uint8), side.pack(rows).view(torch.uint8))
    # in place of a row: as one of many
    assert torch.equal(
        form.keys.pack(rows[None, 7:8]).view(torch.uint8)[0, 0],
        form.keys.pack(rows).view(torch.uint8)[7],
    )


def test_rows_are_packed_alike_by_any_number_of_threads():
    before, rows = torch.get_num_threads(), torch.randn(5, 700, 64)
    try:
        for form in FORMS.values():
            found = []
            for threads in (1, 3):
                torch.set_num_threads(threads)
                found.append(form.keys.pack(rows).view(torch.uint8))
            assert torch.equal(*found)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("what", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so(what):
    rows = torch.randn(2, 64)
    rows[1, 5] = what
    for form in FORMS.values():
        for side in (form.keys, form.values):
            found = side.scales(side.pack(rows))
            assert found[0].isfinite() and not found[1].isfinite()


def test_queries_are_transformed_with_less_rounding_than_a_product():
    q = torch.randn(3, 5, 96) * torch.logspace(-3, 3, 96)
    exact = q.double() @ hadamard.signs(96, torch.float64, q.device, hadamard.query_factor(96))
    found = hadamard.transformed_queries(q)
    with no_compiler():
        plain = hadamard.transformed_queries(q)
    error, allowed = (t.double().sub(exact).abs().max() for t in (found, plain))
    assert found.dtype == torch.float32 and error <= allowed


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    bank=BANKS,
    length=st.sampled_from(SEAMS),
    group=st.sampled_from([1, 3, 4, 5, 8]),
    queries=st.sampled_from([1, 2, 8]),
    head_dim=st.sampled_from([32, 64, 96, 128, 160, 256]),
    dtype=st.sampled_from(list(kernel_checks.EPSILON)),
    layout=st.sampled_from(["heads", "tokens"]),
    kind=st.sampled_from([None, "softmax", "raw"]),
)
def test_dense(bank, length, group, queries, head_dim, dtype, layout, kind):
    with pytest.MonkeyPatch.context() as patch:
        over_packed_rows(patch, kernel_checks, "decode_dense", form=bank)
        kernel_checks.check_dense(
            "cpu", "auto", [length], 2, group, queries, head_dim, dtype, layout, kind
        )  # fmt: skip


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    bank=BANKS,
    count=st.sampled_from(SEAMS[:-2]),
    tail=st.sampled_from([1, 255, 257]),
    group=st.sampled_from([1, 3, 8]),
    queries=st.sampled_from([1, 8]),
    head_dim=st.sampled_from([32, 64, 128]),
    per_head=st.booleans(),
)
def test_sparse(bank, count, tail, group, queries, head_dim, per_head):
    with pytest.MonkeyPatch.context() as patch:
        over_packed_rows(patch, kernel_checks, "decode_sparse", form=bank)
        kernel_checks.check_sparse(
            "cpu", "auto", [count], [max(tail, queries)], 2, group, queries, head_dim,
            torch.float32, "tokens", per_head,
        )  # fmt: skip


@pytest.mark.parametrize("bank", DTYPES)
@pytest.mark.parametrize("group, queries", [(1, 1), (3, 1), (8, 8)])
@pytest.mark.parametrize("size", [1.0, 1e-34, 0.0])
def test_error_is_at_most_twice_that_of_torch(bank, group, queries, size):
    """Beside float64. Queries of 1e-34 have no digits, and go in as floats."""
    form = FORMS[DTYPES[bank]]
    k, v = torch.randn(2, 2, SPLIT + 300, 64)
    k, v = form.keys.pack(k), form.values.pack(v)
    assert attends(k, v, 64)
    q, n = torch.randn(queries, 2 * group, 64) * size, k.shape[1]
    found, lse = attend(q, k, v, 0.125)
    turned = hadamard.transformed_queries(q).double()
    wide = stored_key_floats(k).double(), floats(v).double()
    visible = [n - (queries - 1 - j) for j in range(queries)]
    expected, logits = kernel_checks.plain(turned, *wide, visible, 0.125, torch.float64)
    with no_compiler():
        plain = decode_dense(q[None], k[None], v[None], ints([n], "cpu"), 0.125)[0]
    error, allowed = ((t.double() - expected).abs().max() for t in (found, plain))
    assert error <= 2 * allowed + 1e-8
    assert lse[-1].double().sub(logits[-1].logsumexp(-1)).abs().max() < 2e-6


@pytest.mark.parametrize("bank", DTYPES)
@pytest.mark.parametrize("side", [0, 1])
def test_scales_that_are_not_finite_show(bank, side):
    """An infinite scale of K may be a logit of -inf: a row that is not seen."""
    form = FORMS[DTYPES[bank]]
    for what in (math.nan, math.inf)[: 1 + side]:
        kv = list(torch.randn(2, 1, 2, 40, 64))
        kv = [form.keys.pack(kv[0]), form.values.pack(kv[1])]
        scales_of(kv[side], side)[0, 0, 9] = what
        q = torch.ones(1, 1, 4, 64)
        out = decode_dense(q, *kv, ints([40], "cpu"), 0.2)
        assert not out[0, 0, :2].isfinite().any() and out[0, 0, 2:].isfinite().all()
        assert decode_dense(q, *kv, ints([9], "cpu"), 0.2).isfinite().all()


@pytest.mark.parametrize("bank", DTYPES)
def test_values_of_1e_33_are_as_near_as_others(bank):
    """Such weights have no digits, and go in as floats."""
    form = FORMS[DTYPES[bank]]
    k, v = torch.randn(2, 1, 2, 40, 64)
    k, q, n = form.keys.pack(k), torch.randn(1, 1, 4, 64), ints([40], "cpu")
    small, large = (decode_dense(q, k, form.values.pack(v * x), n, 0.2) for x in (2.0**-110, 1.0))
    assert torch.allclose(small * 2.0**110, large, rtol=0, atol=2e-6)
