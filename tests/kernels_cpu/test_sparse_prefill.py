"""Gathered prefill attention in plain torch against the float64 oracle; K and V that are not chosen
hold NaN.
"""

import pytest
import torch

from tests.kernels.support.prefill_checks import check_prefill_sparse

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16

pytestmark = pytest.mark.usefixtures("form")


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize(
    "chunk, count, band, shape",
    [
        (1, 1, 0, dict()),
        (1, 0, 3, dict(gap=0)),
        (64, 128, 64, dict(layout="heads")),
        (65, 33, 1, dict(group=1, kv_heads=3, head_dim=40)),
        (31, 100, 130, dict(group=8, kv_heads=1, head_dim=96, batch=1)),
        (20, 0, 0, dict(gap=7)),
        (50, 30, 10, dict(edges=(1, 20, 45))),
        (20, 30, 10, dict(sharpness=6.0)),
        (20, 50, 10, dict(gap=0)),  # every row of the past is chosen
    ],
)
def test_against_float64(backend, dtype, chunk, count, band, shape):
    check_prefill_sparse("cpu", backend, chunk, count, band, dtype=dtype, **shape)
