"""The transform of K and of queries: orthogonal, the same bits whoever computes it.

Stops: a factor that is applied twice or never, elements of a padded head that mix with others,
sums whose order shows, queries that are transformed otherwise than rows.
"""

import pytest
import torch

from kernels.rows.forms import key_floats, unpack, unpack_keys
from kernels.rows.hadamard import (
    query_factor,
    row_factor,
    run_length,
    signs,
    transformed_queries,
    transformed_rows,
    wide_queries,
)
from kernels.rows.int8 import pack, pack_keys, scales, values

DIMS = [4, 20, 40, 64, 80, 96, 128, 256]
CPU = torch.device("cpu")


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dim", DIMS)
def test_the_transform_is_orthogonal_and_its_factors_are_powers_of_two(dim):
    matrix, count = signs(dim, torch.float64, CPU), 2 * run_length(dim)
    assert torch.equal(matrix, matrix.t())
    assert torch.equal(matrix @ matrix, count * torch.eye(dim, dtype=torch.float64))
    assert bool((matrix.abs().sum(0) == count).all())
    assert row_factor(dim) * query_factor(dim) == count
    assert all(factor & (factor - 1) == 0 for factor in (row_factor(dim), query_factor(dim)))
    assert count == dim or dim not in (4, 64, 128, 256), "all elements of such a head are mixed"


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_stay(dim, dtype):
    q, k = normal(5, dim).to(dtype), normal(7, dim, seed=1).to(dtype)
    want = q.double() @ k.double().t()
    exact = transformed_rows(k).double().t()
    found = transformed_queries(q.float()).double() @ exact
    assert torch.allclose(found, want, atol=1e-5 * dim**0.5)
    if dtype != torch.float32:
        rough = transformed_queries(q).double() @ exact
        assert torch.allclose(rough, want, atol=2e-2 * dim**0.5)


@pytest.mark.parametrize("dim", [20, 64, 128])
def test_rows_get_the_same_bits_in_any_company(dim):
    k = normal(3, 2, 37, dim) * torch.logspace(-3, 3, dim)
    whole, packed = transformed_rows(k), pack_keys(k)
    for b, h, t in ((0, 0, 0), (2, 1, 36), (1, 0, 17)):
        assert torch.equal(transformed_rows(k[b, h, t]), whole[b, h, t])
        assert torch.equal(pack_keys(k[b, h, t : t + 1])[0], packed[b, h, t])
    back = key_floats(packed)
    assert torch.equal(key_floats(packed[1, :, 5:6]), back[1, :, 5:6])
    assert torch.equal(key_floats(packed.flip(2)).flip(2), back)
    assert torch.equal(unpack_keys(packed, torch.bfloat16), back.bfloat16())


@pytest.mark.parametrize("dim", [20, 64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_a_step_gives_the_exact_sums(dim, dtype):
    q = normal(2, 3, 4, 2 * dim).to(dtype)[..., ::2].contiguous()
    exact = q.double() @ signs(dim, torch.float64, CPU, query_factor(dim))
    assert torch.equal(wide_queries(q), exact.float())
    narrow = q[:, 1:, 1:3]  # strides of a larger tensor
    assert torch.equal(wide_queries(narrow), exact[:, 1:, 1:3].float())


def test_an_outlier_channel_no_longer_takes_the_precision_of_the_others():
    k = normal(400, 64)
    k[:, 5] = 40.0
    plain, transformed = unpack(pack(k), torch.float32), unpack_keys(pack_keys(k), torch.float32)
    one, other = ((found - k).square().mean().sqrt() for found in (plain, transformed))
    assert other < 0.35 * one
    rows = pack_keys(k)
    off = (values(rows) * scales(rows).unsqueeze(-1) - transformed_rows(k)).abs()
    assert bool((off <= scales(rows).unsqueeze(-1) * 0.5001).all())


def test_zeros_and_rows_that_are_not_finite():
    k = normal(4, 64)
    k[0], k[1, 3], k[2, 0] = 0.0, torch.inf, torch.nan
    found = key_floats(pack_keys(k))
    assert not found[0].any() and torch.isfinite(found[3]).all()
    assert not bool(torch.isfinite(found[1:3]).any(-1).any())
