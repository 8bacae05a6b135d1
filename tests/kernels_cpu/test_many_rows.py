"""Products of many rows in strips of a weight of floats, in C++, against float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.launch.isa import ARM_SETS, isa, multiplies
from kernels.layer.linear import pack_linear
from kernels.layer.many import strips
from kernels.layer.many.strips import LEAST, StripProduct, strips_multiply
from kernels.native.library import missing, native

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True, scope="module")
def compiled():
    assert strips._BINDING.usable(), strips._BINDING.fault


def close(found, x, weight, bias, dtype):
    """Whether an error is at most twice that of torch's own product."""
    wide = None if bias is None else bias.double()
    exact = F.linear(x.double(), weight.double(), wide)
    own = (F.linear(x, weight, bias).double() - exact).abs().max()
    limit = 2 * own + torch.finfo(dtype).eps * exact.abs().max() + x.shape[-1] * 2**-26
    return bool((found.double() - exact).abs().max() <= limit)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.sampled_from([1, 5, 6, 7, 12, 13, 61]),
    inputs=st.sampled_from([1, 7, 16, 127, 128, 129, 255, 256, 257, 700]),
    outputs=st.sampled_from([1, 4, 15, 16, 17, 63, 64, 65, 131]),
    bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_product_is_within_twice_torchs_own_error(dtype, rows, inputs, outputs, bias, seed):
    torch.manual_seed(seed)
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    x, added = torch.randn(rows, inputs).to(dtype), torch.randn(outputs).to(dtype)
    held = added if bias else None
    found = StripProduct(weight, held)(x)
    assert found.shape == (rows, outputs) and found.dtype == dtype and found.is_contiguous()
    assert close(found, x, weight, held, dtype)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.sampled_from([1, 6, 17, 61]),
    inputs=st.sampled_from([1, 31, 32, 33, 257, 258, 515]),
    size=st.sampled_from([1, 15, 16, 31, 32, 33, 65]),
    bias=st.booleans(),
    gated=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_follows_a_product_is_rounded_as_torch_rounds(
    dtype, rows, inputs, size, bias, gated, seed
):
    """SwiGLU and a residual that lies in the middle of another tensor."""
    torch.manual_seed(seed)
    outputs = 2 * size if gated else size
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    x, added = torch.randn(2, rows, inputs).to(dtype), torch.randn(outputs).to(dtype)
    held, residual = added if bias else None, torch.randn(2, rows, size + 3).to(dtype)[..., 2:-1]
    found = StripProduct(weight, held)(x, residual, gated)
    exact = F.linear(x.double(), weight.double(), None if held is None else held.double())
    own = F.linear(x, weight, held)
    if gated:
        gate, up = exact.chunk(2, -1)
        exact, (gate, up) = F.silu(gate) * up, own.chunk(2, -1)
        own = F.silu(gate) * up
    exact, own = exact + residual.double(), own + residual
    limit = 2 * (own.double() - exact).abs().max() + inputs * 2**-26
    limit += 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert found.shape == (2, rows, size) and found.is_contiguous()
    assert (found.double() - exact).abs().max() <= limit


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", (1055, 1056, 1057, 2113))
def test_blocks_of_rows(rows, dtype):
    """A block of rows is 1,056 at most; a row's bits do not depend on the others."""
    torch.manual_seed(rows)
    weight, x = torch.randn(70, 40).to(dtype), torch.randn(1, rows, 40).to(dtype)
    product = StripProduct(weight)
    found = product(x)
    assert close(found, x, weight, None, dtype)
    assert torch.equal(found[:, 1046:], product(x[:, 1046:]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_the_threads(dtype):
    torch.manual_seed(2)
    found, before = [], torch.get_num_threads()
    x, residual = torch.randn(701, 290).to(dtype), torch.randn(701, 150).to(dtype)
    product = StripProduct(torch.randn(300, 290).to(dtype))
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(torch.cat((product(x), product(x, residual, gated=True)), 1))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, found[0]) for one in found)


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_what_is_not_finite_stays_in_its_row_and_output(bad):
    torch.manual_seed(3)
    weight, x = torch.randn(70, 33), torch.randn(20, 33)
    x[4, 7] = bad
    assert StripProduct(weight)(x).isfinite().all(1).tolist() == [r != 4 for r in range(20)]
    x[4, 7], weight[66, 32] = 1.0, bad
    assert StripProduct(weight)(x).isfinite().all(0).tolist() == [o != 66 for o in range(70)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_linear_multiplies_many_rows_so_where_it_is_faster(dtype):
    weight = torch.randn(40, 64).to(dtype)
    library = native()
    x86 = isa() not in ARM_SETS and not library.omnikv_is_intel()
    emulated = dtype == torch.float32 or not multiplies(dtype)
    paired = dtype == torch.bfloat16 and isa() == "avx512_bf16"
    assert strips_multiply(weight) == (x86 and (emulated or paired))
    linear = pack_linear(weight, torch.randn(40).to(dtype))
    few, many = torch.randn(16, 64).to(dtype), torch.randn(64, 64).to(dtype)
    assert linear.own(few) is not None
    if strips_multiply(weight):
        assert isinstance(linear.many, StripProduct) and linear.product.most_rows == LEAST - 1
        assert linear.own(many) is None and linear.strips(many) is linear.many
        assert linear.strips(few) is None and torch.equal(linear(many), linear.many(many))
    assert linear.on_torch().many is None
    assert close(linear(many), many, weight, linear.bias, dtype)


def test_other_weights_are_left_to_torch():
    assert not strips_multiply(torch.randn(8, 8).t()[:, :4])
    assert not strips_multiply(torch.randn(8, 8, dtype=torch.float64))
    assert not strips_multiply(torch.empty(8, 8, device="meta"))
