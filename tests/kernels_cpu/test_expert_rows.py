"""Rows of a chunk on their way through a mixture of experts, in C++, against float64.

Stops: a row that is added to another, what lies behind the last column, gates taken for ups.
"""

import pytest
import torch

from kernels.experts.native_rows import _BINDING, add_rows, take_rows
from kernels.experts.open import Activation, activated
from kernels.layer.native_step import ACTIVATIONS, act_rows

pytestmark = pytest.mark.skipif(not _BINDING.usable(), reason="no C++ kernels here")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = [(1, 1), (7, 15), (9, 16), (33, 17), (300, 131)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count, size", SIZES)
def test_rows_are_taken_and_added_where_they_came_from(count, size, dtype):
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(2 * count, size, generator=generator).to(dtype)
    rows, shares = torch.randperm(2 * count, generator=generator)[:count], torch.rand(count)
    taken = take_rows(x, rows)
    assert torch.equal(taken, x[rows])
    out = torch.randn(2 * count + 1, size, generator=generator)
    wanted = out.double()
    wanted[rows] += taken.double() * shares.double()[:, None]
    found, threads = [], torch.get_num_threads()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(out.clone())
            add_rows(found[-1], taken, rows, shares)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*found)
    torch.testing.assert_close(found[0].double(), wanted, atol=1e-6, rtol=1e-6)
    assert torch.equal(found[0][-1], out[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count, size", SIZES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_an_activation_errs_no_more_than_torch_s(kind, count, size, dtype):
    activation = Activation(kind, 0.7, 1.702) if kind == "clamped" else Activation(kind)
    generator = torch.Generator().manual_seed(size)
    made = (torch.randn(count, activation.made * size, generator=generator) * 3).to(dtype)
    made[0, 0] = float("nan")
    found, wanted = act_rows(made, *activation).double(), activated(made.double(), activation)
    plain = activated(made, activation).double()
    assert torch.equal(found.isnan(), wanted.isnan()) and found.isnan().sum() == 1
    found, wanted, plain = (t.nan_to_num(0.0) for t in (found, wanted, plain))
    step = torch.finfo(dtype).eps * (1 + wanted.abs().max())
    assert (found - wanted).abs().max() <= 2 * (plain - wanted).abs().max() + step
    if kind != "relu2" and size > 1:  # the control: gates and ups the other way round
        other = activated(made.double().flip(1), activation).nan_to_num(0.0)
        assert (found - other).abs().max() > 0.1
