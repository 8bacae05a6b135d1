"""Parts of a prompt's past merged one after the other, interpreted, against attention over all rows
in float64.

Stops: a weight of the wrong part, NaN where a part shows a query no row, a sum rounded to 16 bits
between two parts, rows of the last program beyond the end.
"""

import pytest
import torch

from kernels.prefill.merge import ROWS, merge, take_part
from tests.kernels.support.kernel_checks import EPSILON

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def parts_of(rows, dim, lengths, seed, spread=3.0):
    """(parts in float64, attention over all of them): random logits of each part's rows."""
    generator = torch.Generator().manual_seed(seed)
    logits = [spread * torch.randn(*rows, n, generator=generator).double() for n in lengths]
    values = [torch.randn(*rows, n, dim, generator=generator).double() for n in lengths]
    parts = [
        ((one.softmax(-1).unsqueeze(-1) * v).sum(-2), one.logsumexp(-1))
        for one, v in zip(logits, values, strict=True)
    ]
    every, whole = torch.cat(logits, -1), torch.cat(values, -2)
    return parts, ((every.softmax(-1).unsqueeze(-1) * whole).sum(-2), every.logsumexp(-1))


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize(
    "rows, dim, lengths",
    [
        ((1, 1, 1), 16, (1, 1)),
        ((1, ROWS - 1, 1), 64, (64, 8, 3)),
        ((2, 5, 3), 80, (40, 1, 20, 7)),
        ((1, ROWS + 1, 4), 128, (64, 32, 16, 8, 4, 2, 1, 5, 9)),  # a million tokens' parts
    ],
)
def test_parts_are_attention_over_all_rows(dtype, rows, dim, lengths):
    exact, (wanted, lse) = parts_of(rows, dim, lengths, seed=dim)
    given = [(out.to(dtype), one.float()) for out, one in exact]
    plain = merge([(out.clone(), one.clone()) for out, one in given], F32)
    found = given[0]
    for part in given[1:]:
        found = take_part(found, part, "triton")
    assert found[0].dtype == F32 and found[0].shape == wanted.shape
    error = (found[0].double() - wanted).abs().max()
    allowed = (plain[0].double() - wanted).abs().max()
    # of plain torch over all parts at once: twice
    assert error <= 2 * allowed + 4 * EPSILON[F32] * wanted.abs().max()
    assert (found[1].double() - lse).abs().max() <= 4e-6 * lse.abs().max() + 1e-6


def test_a_part_may_show_a_query_no_row():
    """lse -inf: the other part stands as it is; nothing at all stays out 0 and lse -inf."""
    parts, _ = parts_of((1, 6, 2), 32, (5, 9), seed=3)
    (a, la), (b, lb) = ((out.float(), one.float()) for out, one in parts)
    a[:, 0], la[:, 0] = 0.0, -torch.inf
    b[:, 1], lb[:, 1] = 0.0, -torch.inf
    for out, one in ((a, la), (b, lb)):
        out[:, 2], one[:, 2] = 0.0, -torch.inf
    wanted = merge([(a.clone(), la.clone()), (b.clone(), lb.clone())], F32)
    found = take_part((a.clone(), la.clone()), (b, lb), "triton")
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(found[1].isinf(), wanted[1].isinf()) and bool(found[1][:, 2].isinf().all())
    assert torch.equal(found[0][:, 0], b[:, 0]) and torch.equal(found[0][:, 1], a[:, 1])
    assert not found[0][:, 2].any() and bool(torch.isfinite(found[0]).all())


def test_large_logits_do_not_overflow_and_views_are_taken():
    parts, _ = parts_of((1, 4, 3), 16, (3, 3), seed=1)
    given = [
        (out.float().transpose(1, 2).contiguous().transpose(1, 2), one.float() + shift)
        for (out, one), shift in zip(parts, (3e4, 2.9e4), strict=True)
    ]
    wanted = merge([(out.clone(), one.clone()) for out, one in given], F32)
    found = take_part(*given, backend="triton")
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found[1], wanted[1])
