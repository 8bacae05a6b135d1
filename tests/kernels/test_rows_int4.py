"""Rows of K in 6 bits and of V in 4: the bytes by hand, the scale that is chosen, and the same bits
in any company.

Stops: bits that another element gets, a search that takes a worse scale than the plain one, sums
whose order shows, values that are not transformed, or not transformed back.
"""

import pytest
import torch

from kernels.rows import int4
from kernels.rows.forms import (
    floats,
    key_floats,
    row_widths,
    unpack,
    unpack_keys,
    value_sums,
    widen_keys,
    widen_values,
)
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


def keys_by_hand(row, dim):
    """The numbers of a row of K, one element after the other."""
    row, found = row.tolist(), [0] * dim
    for i in range(dim // 4):
        planes = [row[i + n * (dim // 4)] for n in range(3)]
        found[2 * i] = planes[0] % 64 - 32
        found[2 * i + dim // 2] = planes[1] % 64 - 32
        found[2 * i + 1] = planes[2] % 64 - 32
        # numbers of two bits with a sign, from -2 to 1
        parts = [(plane // 64 + 2) % 4 - 2 for plane in planes]
        found[2 * i + 1 + dim // 2] = 16 * parts[0] + 4 * parts[1] + parts[2] + 10
    return torch.tensor(found)


def values_by_hand(row, dim):
    """The numbers of a row of V."""
    row = row.tolist()
    return torch.tensor(
        [row[d % (dim // 2)] // (16 if d >= dim // 2 else 1) % 16 - 8 for d in range(dim)]
    )


@pytest.mark.parametrize("dim", DIMS)
def test_bytes_are_as_the_module_says(dim):
    x = normal(40, dim, seed=dim) * torch.logspace(-1, 1, dim)
    k, v = key_pack(x), value_pack(x)
    assert (k.shape[1], v.shape[1]) == row_widths(dim, torch.uint8)
    assert k.shape[1] % 4 == v.shape[1] % 4 == 0
    assert (dim, k.shape[1], v.shape[1]) in {
        (32, 28, 20), (64, 52, 36), (96, 76, 52), (160, 124, 84), (256, 196, 132)
    }  # fmt: skip
    assert (int4.key_dim(k.shape[1]), int4.value_dim(v.shape[1])) == (dim, dim)
    for row in (0, 39):
        assert torch.equal(key_values(k)[row].int(), keys_by_hand(k[row], dim))
        assert torch.equal(value_values(v)[row].int(), values_by_hand(v[row], dim))
    assert set(key_values(k).flatten().tolist()) <= set(range(-32, 32))
    for held, values, scales in ((k, key_values, key_scales), (v, value_values, value_scales)):
        # the row's largest element is the number that reaches one further, whatever its sign is
        turned = transformed_rows(x)
        largest = turned.abs().argmax(-1, keepdim=True)
        low = values(held).gather(-1, largest).flatten().int()
        assert bool((low == (-32 if held is k else -8)).all())
        assert torch.equal(scales(held) < 0, turned.gather(-1, largest).flatten() > 0)
    assert torch.equal(widen_keys(k, torch.empty(40, dim)), key_values(k).float())
    assert torch.equal(widen_values(v, torch.empty(40, dim)), value_values(v).float())
    assert torch.equal(unpack(v, torch.bfloat16), floats(v).bfloat16())
    assert torch.equal(unpack_keys(k, torch.bfloat16), key_floats(k).bfloat16())


@pytest.mark.parametrize("dim", DIMS)
def test_sums_of_values_are_transformed_back(dim):
    v, weights = value_pack(normal(50, dim, seed=3)), normal(7, 50, seed=4)
    stored = value_values(v).double() * value_scales(v).double().unsqueeze(-1)
    found = value_sums((weights.double() @ stored).float(), v)
    exact = weights.double() @ floats(v).double()
    assert torch.allclose(found.double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))
    assert value_sums(found, found) is found


def error(found, exact):
    return (found.double() - exact.double()).square().sum(-1)


def plain(x, top):
    """Whole numbers up to `top` under the scale that reaches the largest element."""
    x = x.double()
    scale = x.abs().amax(-1, keepdim=True) / top
    return (x / scale).round() * scale


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("side", ["keys", "values"])
def test_the_scale_is_chosen_by_squared_error(side, dim):
    x = normal(300, dim, seed=1)
    x[:, ::7] *= 2.0
    exact = transformed_rows(x)
    if side == "keys":
        held, top = key_pack(x), 31
        found, back = key_values(held).float() * key_scales(held).unsqueeze(-1), key_floats(held)
    else:
        held, top = value_pack(x), 7
        found, back = value_values(held).float() * value_scales(held).unsqueeze(-1), floats(held)
    best, usual = error(found, exact), error(plain(exact, top), exact)
    assert best.sum() < (0.97 if side == "keys" else 0.85) * usual.sum()
    # an orthogonal transform keeps errors
    turned_back = error(back, x) * query_factor(dim) / row_factor(dim)
    assert torch.allclose(turned_back, best, rtol=1e-3)


def test_no_tried_scale_of_values_is_better_by_more_than_a_step_of_the_measure():
    exact = transformed_rows(normal(300, 64, seed=2))
    most = exact.abs().amax(-1, keepdim=True)
    sign = torch.where(exact.amax(-1, keepdim=True) == most, -1.0, 1.0)
    tried = []
    for share in (16, 15, 14, 13):
        scale = most * sign * (share / 128)
        tried.append(error((exact / scale).round().clamp(-8, 7) * scale, exact))
    held = value_pack(normal(300, 64, seed=2))
    best = error(value_values(held).float() * value_scales(held).unsqueeze(-1), exact)
    tried = torch.stack(tried)
    assert bool((best <= tried.amin(0) * 1.03).all())
    assert len(set(tried.argmin(0).tolist())) > 2, "one scale would do"


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
    assert torch.equal(pack(x, "reference"), whole)


def test_zeros_small_rows_and_rows_that_are_not_finite():
    x = normal(6, 64)
    x[0], x[1] = 0.0, 1e-40
    x[2, 3], x[3, 1], x[4, 7] = torch.nan, torch.inf, -torch.inf
    for rows in (floats(value_pack(x)), key_floats(key_pack(x))):
        assert not rows[:2].any()
        assert not bool(torch.isfinite(rows[2:5]).all(-1).any())
        assert torch.isfinite(rows[5]).all()
    assert not value_scales(value_pack(x))[:2].any() and not key_scales(key_pack(x))[:2].any()
