"""Attention of several queries in the lanes of a vector (kernels/native/lanes.cpp), at its seams:
tiles of 32 to 128 keys, 8 or 16 queries a vector, two vectors before the next.

Stops: a query that sees another's rows, lanes without a query that reach a result, bits that depend
on how many queries there are, a cap, logs or an index that lanes leave out.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.cpu import attend_sequence
from kernels.attention.native import SPLIT, attend, attends
from kernels.launch.isa import isa
from kernels.launch.softmax import Softmax
from kernels.native.library import missing
from kernels.rows import hadamard
from kernels.rows.forms import FORMS, floats, stored_key_floats
from tests.no_compiler import no_compiler

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
FLOATS = [torch.float32, torch.bfloat16, torch.float16]
SEAMS = [64, 65, 95, 97, 127, 128, 129, 257, SPLIT + 1]


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    length=st.sampled_from(SEAMS),
    group=st.sampled_from([1, 4, 7, 8, 35]),
    queries=st.integers(1, 8),
    head_dim=st.sampled_from([16, 48, 64, 96, 128, 256]),
    dtype=st.sampled_from([*FLOATS, *FORMS]),
    cap=st.sampled_from([0.0, 2.0]),
)
def test_error_is_at_most_twice_that_of_torch(length, group, queries, head_dim, dtype, cap):
    """Beside float64."""
    if dtype in FORMS and head_dim % 32:
        head_dim = 64
    generator = torch.Generator().manual_seed(length + queries)
    q = torch.randn(queries, 2 * group, head_dim, generator=generator)
    k, v = torch.randn(2, 2, length, head_dim, generator=generator)
    if dtype in FORMS:
        k, v = FORMS[dtype].keys.pack(k), FORMS[dtype].values.pack(v)
    else:
        q, k, v = (t.to(dtype) for t in (q, k, v))
    assert attends(k, v, head_dim)
    softmax = Softmax(cap=cap)
    found, lse = attend(q, k, v, 0.125, softmax=softmax)
    turned = hadamard.transformed_queries(q).double() if dtype in FORMS else q.double()
    wide_k = (stored_key_floats(k) if dtype in FORMS else k).double()
    visible = [length - (queries - 1 - j) for j in range(queries)]
    expected, logits = oracle(turned, wide_k, floats(v).double(), visible, cap)
    with no_compiler():
        torch_found, _ = attend_sequence(q, k, v, 0.125, softmax=softmax)
    error, allowed = ((t.double() - expected).abs().max() for t in (found, torch_found))
    assert error <= 2 * allowed + 1e-7
    assert (lse.double() - logits.logsumexp(-1)).abs().max() < 1e-5


def oracle(q, k, v, visible, cap):
    """Attention and logits in float64: q [Q, H, D], k, v [Hkv, n, D]."""
    group = q.shape[1] // len(k)
    k, v = (t.repeat_interleave(group, 0) for t in (k, v))
    logits = torch.einsum("qhd,hnd->qhn", q, k) * 0.125
    logits = cap * torch.tanh(logits / cap) if cap else logits
    for j, n in enumerate(visible):
        logits[j, :, n:] = -torch.inf
    return torch.einsum("qhn,hnd->qhd", logits.softmax(-1), v), logits


@pytest.mark.parametrize("dtype", [*FLOATS, *FORMS])
@pytest.mark.parametrize("group", [8, 3, 4])
def test_a_query_has_the_bits_that_it_has_among_others(dtype, group):
    """All by tiles, or from as many queries on as any machine lays across: 16 of a K/V head."""
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(8, 2 * group, 64, generator=generator)
    k, v = torch.randn(2, 2, SPLIT + 133, 64, generator=generator)
    if dtype in FORMS:
        k, v = FORMS[dtype].keys.pack(k), FORMS[dtype].values.pack(v)
    else:
        q, k, v = (t.to(dtype) for t in (q, k, v))
    tiles_alone = isa() in ("avx512_bf16", "amx") and dtype in (torch.float32, torch.bfloat16)
    least = 1 if tiles_alone else -(-16 // group)
    all_of_them, lse = attend(q, k, v, 0.125, narrow=True)
    for count in range(least, 8):
        found, own = attend(q[-count:], k, v, 0.125, narrow=True)
        assert torch.equal(found, all_of_them[-count:]) and torch.equal(own, lse[-count:])


@pytest.mark.parametrize("dtype", FLOATS)
def test_an_index_and_rows_that_count_several_times(dtype):
    generator = torch.Generator().manual_seed(5)
    q, k = torch.randn(8, 8, 64, generator=generator), torch.randn(2, 400, 64, generator=generator)
    v = torch.randn(2, 400, 64, generator=generator)
    q, k, v = (t.to(dtype) for t in (q, k, v))
    index = torch.arange(0, 390, 3, dtype=torch.int32).repeat(2, 1)
    index[1] += 1
    times = torch.arange(130) % 3 + 1
    logs = torch.cat([times.float().log(), torch.zeros(9)])
    found, _ = attend(q, k, v, 0.125, index, 130, 391, logs=logs)
    for head in range(2):
        rows = torch.cat([index[head].long(), torch.arange(391, 400)])
        some_k, some_v = (t[head : head + 1, rows].double() for t in (k, v))
        own = q[:, 4 * head : 4 * head + 4].double()
        logits = torch.einsum("qhd,nd->qhn", own, some_k[0]) * 0.125 + logs
        for j in range(8):
            logits[j, :, 139 - (7 - j) :] = -torch.inf
        expected = torch.einsum("qhn,nd->qhd", logits.softmax(-1), some_v[0])
        error = (found[:, 4 * head : 4 * head + 4].double() - expected).abs().max()
        assert error < (2e-6 if dtype == torch.float32 else 8e-3)


def test_a_query_that_sees_nothing_and_one_whose_logits_are_all_minus_infinity():
    k, v = torch.randn(2, 1, 64, 64)
    q = torch.randn(8, 4, 64)
    logs = torch.full((64,), -torch.inf)
    found, lse = attend(q, k, v, 0.125, logs=logs)
    assert (found == 0).all() and (lse == -torch.inf).all()
    logs[3] = 0
    found, lse = attend(q, k, v, 0.125, logs=logs)
    assert (found - v[0, 3]).abs().max() < 1e-6 and lse.isfinite().all()
