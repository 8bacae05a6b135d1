"""Scores and logits of a query without its attention: those that attention leaves, to the bit.

Stops: a value that is read, logits that lie elsewhere, a log-sum-exp of some rows only.
"""

import pytest
import torch

from kernels.attention.dense import decode_dense
from kernels.attention.native import SPLIT, attend, attends, logits_natively, score_natively
from kernels.launch.softmax import PLAIN, Softmax
from kernels.native.library import missing
from kernels.rows.forms import FORMS
from tests.kernels.support.kernel_checks import ints

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [1, 15, 16, 17, 255, 256, 257, 1021, SPLIT + 3]


def rows_of(rows, group, dtype, dim=64):
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(1, 2 * group, dim, generator=generator).to(dtype)
    k, v = torch.randn(2, 2, rows, dim, generator=generator).to(dtype)
    assert attends(k, v, dim)
    return q, k, v


@pytest.mark.parametrize("softmax", ["plain", "capped with sinks"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("rows", ROWS)
def test_logits_are_those_that_attention_leaves(rows, group, dtype, softmax):
    q, k, v = rows_of(rows, group, dtype)
    special = PLAIN if softmax == "plain" else Softmax(1.5, torch.linspace(-1, 1, 2 * group))
    room = torch.full((2 * group * rows + 7,), float("nan"))
    held = room.clone()
    _, lse = attend(q, k, v, 0.125, logits=held, softmax=special)
    found = logits_natively(q, k, 0.125, room, special)
    assert torch.equal(room[:-7], held[:-7]) and room[-7:].isnan().all()
    torch.testing.assert_close(found, lse[0], atol=1e-6, rtol=1e-6)
    wide = q[0].double().view(2, group, 64) @ k.double().mT * 0.125
    if softmax == "plain":
        exact = wide.logsumexp(-1).flatten()
        torch.testing.assert_close(found.double(), exact, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("kind", ["softmax", "raw"])
@pytest.mark.parametrize("form", [None, *FORMS])
@pytest.mark.parametrize("lengths", [(300,), (1, 257), (4097, 16)])
def test_scores_are_those_of_dense_attention(lengths, form, kind):
    generator = torch.Generator().manual_seed(1)
    most, batch = max(lengths), len(lengths)
    q = torch.randn(batch, 1, 8, 64, generator=generator)
    k, v = torch.randn(2, batch, 2, most + 3, 64, generator=generator)
    if form is not None:
        k, v = FORMS[form].keys.pack(k), FORMS[form].values.pack(v)
    assert attends(k, v, 64)
    expected, scores = (torch.full((batch, most + 3), -7.0) for _ in range(2))
    seen = ints(list(lengths), "cpu")
    decode_dense(q, k, v, seen, 0.125, expected, kind)
    held, parts = torch.empty(8 * most), torch.empty(0)
    score_natively(q, k, seen, 0.125, scores, kind, held, parts)
    assert torch.equal(scores, expected)
    assert all((row[n:] == -7).all() for row, n in zip(scores, lengths))
