"""Latent attention's part of a decode step in C++ against its own form in torch's operators, in
float64 and in the dtype.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.model.config.latent import Latent
from engine.model.heads.latent import EPS, LatentHeads
from engine.model.heads.latent import by_head as torchs
from kernels.layer import native_latent
from kernels.layer.native_latent import by_head, latent_heads, reads_latent
from kernels.layer.native_step import rotate_store
from kernels.native.library import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True, scope="module")
def compiled():
    assert native_latent._BINDING.usable(), native_latent._BINDING.fault


FEW = settings(max_examples=30, deadline=None, derandomize=True)


def near(found, own, exact):
    """Whether an error is at most twice that of torch's operators, of the largest value."""
    limit = 2 * (own.double() - exact).abs().max()
    limit += (torch.finfo(own.dtype).eps + 2**-20) * exact.abs().max()
    return found.shape == own.shape and bool((found.double() - exact).abs().max() <= limit)


@FEW
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(1, 1), (1, 3), (2, 4), (1, 5), (3, 3)]),
    heads=st.sampled_from([1, 2, 5]),
    inputs=st.sampled_from([1, 12, 63, 64, 65, 200]),
    outputs=st.sampled_from([1, 16, 17, 127, 128, 129, 300]),
    cut=st.booleans(),
    lying=st.booleans(),
)
def test_products_of_heads(dtype, shape, heads, inputs, outputs, cut, lying):
    torch.manual_seed(inputs + outputs)
    x = torch.randn(*shape, heads, inputs + 5).to(dtype)
    x = x[..., 5:] if cut else x[..., 5:].contiguous()
    matrices = (torch.randn(heads, inputs, outputs) / inputs**0.5).to(dtype)
    if lying:
        matrices = matrices.transpose(1, 2).contiguous().transpose(1, 2)
    found, own = by_head(x, matrices), torchs(x, matrices)
    assert found.dtype == dtype and near(found, own, torchs(x.double(), matrices.double()))


@FEW
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.sampled_from([(1, 1), (1, 8), (2, 3)]),
    heads=st.sampled_from([1, 4, 7]),
    plain=st.sampled_from([1, 12, 64, 65]),
    turned=st.sampled_from([2, 8, 34, 64]),
    rank=st.sampled_from([1, 24, 63, 256]),
    stretch=st.booleans(),
)
def test_queries_and_rows(dtype, shape, heads, plain, turned, rank, stretch):
    """With the rotation and the store behind them: what LatentHeads.split and the bank do."""
    torch.manual_seed(plain * rank)
    sizes = Latent(rank, turned, plain, 16, stretch=(0.1, 64) if stretch else None)
    key, norm = torch.randn(heads, plain, rank) / plain**0.5, torch.randn(rank)
    made = torch.randn(*shape, heads * sizes.head + sizes.width)
    angle, times = torch.randn(*shape, turned // 2), 1 + torch.rand(shape[0], shape[1], 1)
    key, norm, made = (t.to(dtype) for t in (key, norm, made))
    cos, sin, results = angle.cos(), angle.sin(), []
    for kind in (torch.float64, dtype):
        latent = LatentHeads(sizes, key.to(kind), key.to(kind), norm.to(kind))
        given = torch.cat((cos, times), -1) if stretch else cos
        results.append(latent.split(made.to(kind), given, sin))
    (q, k, _, before), own = ([t.double() for t in results[0]], results[1])
    assert reads_latent(dtype, key, key, norm)
    parts = made.split([heads * sizes.head, sizes.width], -1)
    qkv = latent_heads(*parts, key, norm, EPS, times if stretch else None)
    bank = torch.zeros(shape[0], 1, 40, sizes.width, dtype=dtype)
    ring = torch.zeros(shape[0], 11, heads, sizes.width, dtype=dtype)
    positions = torch.full((shape[0], 1), 9) + torch.arange(shape[1])
    found = rotate_store(qkv, cos, sin, bank, None, ring, positions)
    assert near(found, own[0], q)
    stored = bank[:, 0, 9 : 9 + shape[1]].unsqueeze(2)
    assert near(stored, own[1], k) and torch.count_nonzero(bank[:, 0, :9]) == 0
    assert near(ring[:, positions[0] % 11], own[3], before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_the_threads(dtype):
    torch.manual_seed(4)
    q, row = torch.randn(1, 5, 6 * 48).to(dtype), torch.randn(1, 5, 16 + 256).to(dtype)
    key, norm = torch.randn(6, 32, 256).to(dtype), torch.randn(256).to(dtype)
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            made = latent_heads(q, row, key, norm, EPS)
            value = key.transpose(1, 2)
            found.append((made, by_head(made[:, :, :6, 16:], value)))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for one in found for a, b in zip(one, found[0]))


def test_what_it_takes():
    key, norm = torch.randn(2, 3, 4), torch.randn(4)
    lying = torch.randn(2, 5, 4).transpose(1, 2)
    assert reads_latent(torch.float32, key, lying, norm)
    assert reads_latent(torch.float32, key, lying.contiguous(), norm)
    assert not reads_latent(torch.bfloat16, key, lying, norm)
    assert not reads_latent(torch.float32, lying, lying, norm)
    assert not reads_latent(torch.float32, key, lying[..., ::2], norm)
    assert not reads_latent(torch.float64, key.double(), lying.double(), norm.double())
