"""Column scores in plain torch against the float64 oracle, on hostile shapes."""

import pytest
import torch

import kernels.select.column_scores
from kernels.select.column_scores import column_scores
from tests.kernels.support.prefill_checks import check_column_scores

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    "backend, dtype", [("cpu", F32), ("cpu", F16), ("cpu", BF16), ("reference", F32)]
)
@pytest.mark.parametrize(
    "chunk, stop, shape",
    [
        (1, 1, dict()),
        (5, 63, dict(group=1, kv_heads=3, layout="tokens")),
        (64, 64, dict(group=8, kv_heads=1, head_dim=96)),
        (33, 65, dict(head_dim=40, batch=1)),
        (17, 300, dict(kv_heads=4, group=1, head_dim=128)),
        (60, 90, dict(blocks=[(0, 20, 40), (20, 41, 90), (41, 60, 1)], stride=4)),
        # one row takes nearly all, most weights underflow
        (9, 200, dict(sharpness=6.0)),
        (9, 200, dict(sharpness=0.0)),  # all weights equal
    ],
)
def test_against_float64(backend, dtype, chunk, stop, shape, monkeypatch):
    monkeypatch.setattr(kernels.select.column_scores, "ROWS", 64)
    check_column_scores("cpu", backend, chunk, stop, dtype=dtype, **shape)


def test_nothing_to_score_writes_nothing():
    sums = torch.full((1, 8), 7.0)
    column_scores(
        torch.randn(1, 2, 4, 16),
        torch.randn(1, 2, 8, 16),
        torch.zeros(1, 2, 4),
        [(0, 2, 0)],
        0,
        1,
        0.25,
        sums[None],
    )
    assert (sums == 7.0).all()
