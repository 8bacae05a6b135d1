"""Rows of K in 5 bits and of V in 4: the bytes by hand, the scale that is chosen, and the same bits
in any company.

Stops: bits that another element gets, a search that takes a worse scale than the plain one, sums
whose order shows, a factor of another group.
"""

import pytest
import torch

from kernels.rows import int4
from kernels.rows.forms import floats, key_floats, row_widths, unpack, unpack_keys, widen_values
from kernels.rows.hadamard import query_factor, row_factor, transformed_rows
from kernels.rows.int4 import (
    key_pack,
    key_scales,
    key_values,
    value_pack,
    value_scales,
    value_values,
)

DIMS = [32, 64, 96, 160, 256]


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(row, dim, upper):
    """The numbers of a row of bytes, one element after the other."""
    row, found = row.tolist(), []
    for d in range(dim):
        code = row[d % (dim // 2)] >> (4 if d >= dim // 2 else 0) & 15
        if upper:
            code += (row[dim // 2 + d % (dim // 8)] >> (d // (dim // 8)) & 1) * 16
            found.append(2 * code - 31)
        else:
            group = d // 32
            factor = (row[dim // 2 + group // 2] >> (4 * (group % 2)) & 15) + 1
            found.append((2 * code - 15) * factor)
    return torch.tensor(found)


@pytest.mark.parametrize("dim", DIMS)
def test_bytes_are_as_the_module_says(dim):
    x = normal(40, dim, seed=dim) * torch.logspace(-1, 1, dim)
    k, v = key_pack(x), value_pack(x)
    assert (k.shape[1], v.shape[1]) == row_widths(dim, torch.uint8)
    assert k.shape[1] % 4 == v.shape[1] % 4 == 0
    assert (dim, k.shape[1], v.shape[1]) in {
        (32, 24, 20), (64, 44, 36), (96, 64, 52), (160, 104, 88), (256, 164, 136)
    }  # fmt: skip
    for row in (0, 39):
        assert torch.equal(key_values(k)[row].int(), by_hand(k[row], dim, True))
        assert torch.equal(value_values(v)[row].int(), by_hand(v[row], dim, False))
    assert int(value_values(v).abs().max()) <= 120
    assert torch.equal(widen_values(v, torch.empty(40, dim)), value_values(v).float())
    scale = v[:, -2:].clone().view(torch.bfloat16).float()
    assert torch.equal(floats(v), value_values(v).float() * scale)
    assert torch.equal(unpack(v, torch.bfloat16), floats(v).bfloat16())
    assert torch.equal(unpack_keys(k, torch.bfloat16), key_floats(k).bfloat16())


def error(found, exact):
    return (found.double() - exact.double()).square().sum(-1)


def plain(x, top, groups=1):
    """Odd numbers up to `top` under the scale that reaches the largest element of a group."""
    x = x.double().unflatten(-1, (groups, -1))
    scale = x.abs().amax(-1, keepdim=True) / top
    level = (x.abs() / scale / 2).floor().clamp(max=top // 2)
    return ((2 * level + 1) * scale * x.sign()).flatten(-2)


@pytest.mark.parametrize("dim", DIMS)
def test_the_scale_is_chosen_by_squared_error(dim):
    x = normal(300, dim, seed=1)
    x[:, ::7] *= 2.0
    exact = transformed_rows(x)
    held = key_values(key_pack(x)).float() * key_scales(key_pack(x)).unsqueeze(-1)
    best, usual = error(held, exact), error(plain(exact, 31), exact)
    # errors are measured in steps of 1/128, a hundredth of what they compare
    assert bool((best <= usual * 1.01).all()) and bool((best < 0.95 * usual).any())
    back = error(key_floats(key_pack(x)), x) * query_factor(dim) / row_factor(dim)
    assert torch.allclose(back, best, rtol=1e-3)
    best, usual = error(floats(value_pack(x)), x), error(plain(x, 15, dim // 32), x)
    # one scale per 32 elements, each to the bit, is the finer form: factors are whole numbers
    assert best.sum() < 1.02 * usual.sum()


def test_a_small_group_keeps_its_precision():
    x = normal(200, 128)
    x[:, :32] *= 0.125
    small = error(floats(value_pack(x))[:, :32], x[:, :32]).sum() / x[:, :32].square().sum()
    large = error(floats(value_pack(x))[:, 32:], x[:, 32:]).sum() / x[:, 32:].square().sum()
    # the factor is 1 where the largest group's is 8: with one scale the error would be 64 times
    assert small < 2 * large


@pytest.mark.parametrize("pack", [key_pack, value_pack])
def test_rows_get_the_same_bits_in_any_company(monkeypatch, pack):
    x = normal(3, 2, 37, 64) * torch.logspace(-3, 3, 64)
    whole = pack(x)
    for b, h, t in ((0, 0, 0), (2, 1, 36), (1, 0, 17)):
        assert torch.equal(pack(x[b, h, t]), whole[b, h, t])
        assert torch.equal(pack(x[:, h, t : t + 1]), whole[:, h, t : t + 1])
    assert torch.equal(pack(x.transpose(0, 2)), whole.transpose(0, 2))
    assert torch.equal(pack(x.bfloat16().float()), pack(x.bfloat16()))
    monkeypatch.setattr(int4, "AT_ONCE", 64 * 5)
    assert torch.equal(pack(x), whole)


def test_zeros_small_rows_and_rows_that_are_not_finite():
    x = normal(6, 64)
    x[0], x[1] = 0.0, 1e-40
    x[2, 3], x[3, 1], x[4, 7] = torch.nan, torch.inf, -torch.inf
    for rows in (floats(value_pack(x)), key_floats(key_pack(x))):
        assert not rows[:2].any()
        assert not bool(torch.isfinite(rows[2:5]).all(-1).any())
        assert torch.isfinite(rows[5]).all()
    assert not value_scales(value_pack(x))[:2].any() and not key_scales(key_pack(x))[:2].any()
