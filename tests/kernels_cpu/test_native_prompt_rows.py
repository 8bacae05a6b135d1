"""A prompt's attention to int8 rows in whole numbers of 16 bits, against float64, under every
instruction set that this machine can run.

Stops: whole numbers that saturate, a scale of a neighbour or of another block, weights of a block
that are nothing beside another's, what is not finite and vanishes or spreads.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels.prefill.native
from kernels.launch.isa import isa
from kernels.launch.softmax import PLAIN, Softmax
from kernels.native import library
from kernels.prefill.native import attend_prompt
from kernels.rows import hadamard
from kernels.rows.forms import FORMS, floats, stored_key_floats
from tests.kernels.support.kernel_checks import EPSILON, plain
from tests.kernels.support.packed_rows import scales_of
from tests.kernels_cpu.parts import part

pytestmark = pytest.mark.skipif(bool(library.missing()), reason=library.missing())
FORM = FORMS[torch.int8]
DTYPES = [torch.bfloat16, torch.float16]


# this machine's and the least of its kind of processor
SETS = sorted({next(iter(library.own_sets())), isa()})


@pytest.fixture(scope="module", params=SETS)
def compiled(request):
    """The library for an instruction set, in place of this machine's."""
    with pytest.MonkeyPatch.context() as patch:
        own = request.param == isa()
        made = library.native() if own else part(request.param, "prefill.cpp")
        patch.setattr(kernels.prefill.native, "loaded", lambda: made)
        yield request.param


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(q, k, v, visible, scale):
    """Attention of float64 to the rows as they were rounded: out, logits [Q, H, n]."""
    turned = hadamard.transformed_queries(q.float()).double()
    return plain(turned, stored_key_floats(k), floats(v), visible, scale, torch.float64)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    chunk=st.sampled_from([1, 5, 6, 31, 130]),
    past=st.sampled_from([0, 1, 15, 125, 255, 256, 257, 800]),
    group=st.sampled_from([1, 3, 4, 8]),
    dim=st.sampled_from([16, 48, 64, 80, 128, 256]),
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([1.0, 30.0, 1e-4]),
    seed=st.integers(0, 99),
)
def test_error_is_at_most_twice_that_of_torch(compiled, chunk, past, group, dim, dtype, size, seed):
    n, scale = past + chunk, dim**-0.5
    rows = drawn(seed, 2, 2, n, dim)
    rows[:, :, n // 2] *= 20  # one outlier
    rows[1, :, n // 3] = 0
    k, v = FORM.keys.pack(rows[0]), FORM.values.pack(rows[1])
    q = (drawn(seed + 1, chunk, 2 * group, dim) * size).to(dtype)
    visible = list(range(past + 1, n + 1))
    expected, logits = exact(q, k, v, visible, scale)
    found, lse = attend_prompt(q, k, v, scale, past)
    assert found.dtype == dtype
    turned = hadamard.transformed_queries(q.float())
    rough, _ = plain(turned, stored_key_floats(k), floats(v), visible, scale, dtype)
    error, allowed = ((t.double() - expected).abs().max() for t in (found, rough))
    assert error <= 2 * allowed + 4 * EPSILON[dtype] * expected.abs().max()
    largest = logits[logits.isfinite()].abs().max().item()
    assert torch.allclose(lse.double(), logits.logsumexp(-1), atol=1e-4 * (1 + largest), rtol=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dim", [16, 256])
def test_the_largest_numbers_do_not_saturate(compiled, sign, dim):
    """All of 512 rows at 127 or -127, and queries whose elements are all alike."""
    k, v = (torch.zeros(1, 512, dim + 8, dtype=torch.int8) for _ in range(2))
    k[..., :dim], v[..., :dim] = 127 * sign, 127 * sign
    for side, rows in enumerate((k, v)):
        scales_of(rows, side)[:] = 1 / 127
    q = hadamard.transformed_queries(torch.full((7, 2, dim), 3.0)).bfloat16()
    found, lse = attend_prompt(q, k, v, 1 / dim, None)
    expected, logits = exact(q, k, v, [512] * 7, 1 / dim)
    assert (found.double() - expected).abs().max() <= 2**-8
    assert (lse.double() - logits.logsumexp(-1)).abs().max() < 1e-3


def test_a_block_of_little_weight_counts(compiled):
    """4,096 rows whose weights are each below a step of the one that weighs most."""
    n, dim = 4097, 64
    rows = torch.zeros(2, 1, n, dim)
    rows[0, 0, -1], rows[1, 0, :-1] = 1.0, 1.0
    k, v = FORM.keys.pack(rows[0]), FORM.values.pack(rows[1])
    q = torch.full((1, 1, dim), 11 / 8).bfloat16()
    found, _ = attend_prompt(q, k, v, 0.125, None)
    expected, _ = exact(q, k, v, [n], 0.125)
    assert expected.mean() > 0.05
    assert (found.double() - expected).abs().max() <= 2**-8 * expected.abs().max()


def test_caps_windows_and_chosen_rows_see_what_they_should(compiled):
    rows = drawn(1, 2, 2, 700, 64)
    k, v = FORM.keys.pack(rows[0]), FORM.values.pack(rows[1])
    q = (drawn(2, 40, 6, 64) * 4).bfloat16()
    index = torch.randperm(600, generator=torch.Generator().manual_seed(3))[:300].sort().values
    chosen = index.int()[None]
    for softmax in (PLAIN, Softmax(cap=5.0)):
        for case in (dict(window=300), dict(index=chosen, kept=300, start=660), {}):
            wide = attend_prompt(q.float(), k, v, 0.125, 660, softmax=softmax, **case)[0]
            found = attend_prompt(q, k, v, 0.125, 660, softmax=softmax, **case)[0]
            assert (found.float() - wide).norm() <= 3e-3 * wide.norm()


def test_what_is_not_finite_shows_and_stays(compiled):
    rows = drawn(4, 2, 1, 300, 64)
    k, v = FORM.keys.pack(rows[0]), FORM.values.pack(rows[1])
    q = drawn(5, 9, 2, 64).bfloat16()
    whole = attend_prompt(q, k, v, 0.125, 291)[0]
    for bad in (math.nan, math.inf):
        spoilt = q.clone()
        spoilt[4, 1, 7] = bad
        found = attend_prompt(spoilt, k, v, 0.125, 291)[0]
        assert not found[4, 1].isfinite().any()
        found[4, 1] = whole[4, 1]
        assert torch.equal(found, whole)
    for side in (0, 1):
        broken = [k.clone(), v.clone()]
        scales_of(broken[side], side)[0, 17] = math.nan
        assert attend_prompt(q, *broken, 0.125, 291)[0].isnan().any(-1).all()
    assert (attend_prompt(torch.zeros_like(q), k, v, 0.125, 291)[0].isfinite()).all()


def test_results_do_not_depend_on_the_threads(compiled):
    rows = drawn(6, 2, 2, 900, 64)
    k, v = FORM.keys.pack(rows[0]), FORM.values.pack(rows[1])
    q, before, found = drawn(7, 500, 6, 64).bfloat16(), torch.get_num_threads(), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(attend_prompt(q, k, v, 0.125, 400)[0])
    torch.set_num_threads(before)
    assert torch.equal(*found)
