"""Column scores, gathered and block-sparse prefill attention, interpreted, against the float64
oracle on hostile shapes.
"""

import pytest
import torch

from kernels.prefill.block_sparse import BLOCK, block_lists
from tests.kernels.support.by_head_checks import check_by_head
from tests.kernels.support.prefill_checks import (
    check_blocks,
    check_column_scores,
    check_prefill_sparse,
)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize(
    "chunk, stop, shape",
    [
        (1, 1, dict()),
        (5, 63, dict(group=1, kv_heads=3, layout="tokens")),
        (64, 130, dict(group=8, kv_heads=1, head_dim=96, dtype=BF16, batch=1)),
        (33, 65, dict(head_dim=40, dtype=F16)),
        (140, 300, dict(group=4, head_dim=16, dtype=BF16, batch=1)),
        (60, 90, dict(blocks=[(0, 20, 40), (20, 41, 90), (41, 60, 1)], stride=4)),
        (300, 140, dict(blocks=[(0, 256, 140), (256, 300, 100)], stride=16, dtype=BF16)),
        (33, 65, dict(group=8, kv_heads=1, head_dim=512, dtype=BF16, batch=1)),
        (17, 33, dict(group=2, kv_heads=1, head_dim=576, batch=1)),
        (9, 200, dict(sharpness=6.0)),
        (9, 70, dict(sharpness=0.0, dtype=F16)),
    ],
)
def test_column_scores(chunk, stop, shape):
    check_column_scores("cpu", "triton", chunk, stop, **shape)


@pytest.mark.parametrize(
    "chunk, count, band, shape",
    [
        (1, 1, 0, dict()),
        (1, 0, 3, dict(gap=0)),
        (64, 128, 64, dict(layout="heads", dtype=BF16, head_dim=128, group=4)),
        (65, 33, 1, dict(group=1, kv_heads=3, head_dim=40)),
        (31, 100, 130, dict(group=8, kv_heads=1, head_dim=96, batch=1, dtype=F16)),
        (20, 0, 0, dict(gap=7)),
        (50, 30, 10, dict(edges=(1, 20, 45), group=16, kv_heads=1)),
        (90, 64, 64, dict(edges=(64,), group=3, dtype=BF16)),
        (20, 30, 10, dict(sharpness=6.0)),
    ],
)
def test_prefill_sparse(chunk, count, band, shape):
    check_prefill_sparse("cpu", "triton", chunk, count, band, **shape)


@pytest.mark.parametrize(
    "shape, dim, kept, band, softmax, dtype",
    [
        ((4, 2), 16, 37, 13, "", F32),
        ((8, 1), 64, 16, 0, "cap", BF16),
        ((4, 4), 48, 1, 1, "", BF16),
        ((4, 2), 16, 16, 13, "sinks", F32),  # by torch's operators
    ],
)
def test_prefill_by_head(shape, dim, kept, band, softmax, dtype):
    check_by_head("triton", shape, dim, kept, band, softmax, dtype, seed=1)


@pytest.mark.parametrize(
    "blocks, past, shape",
    [
        (1, 0, dict()),  # nothing but the own block
        (2, 0, dict(density=1.0, dtype=BF16)),
        (1, 5, dict(density=0.0, group=1, kv_heads=3)),
        (2, 3, dict(layout="tokens", head_dim=40)),
        (3, 2, dict(group=4, kv_heads=1, head_dim=64, dtype=BF16)),
        (1, 3, dict(group=8, kv_heads=1, head_dim=96, dtype=F16)),
        (1, 2, dict(head_dim=128, dtype=BF16, batch=2, group=1)),
        # float32: tiles smaller than a block
        (1, 2, dict(head_dim=128, group=1)),
        (1, 3, dict(head_dim=256, dtype=BF16, kv_heads=1, group=1)),
        (2, 3, dict(sharpness=6.0)),
    ],
)
def test_block_sparse(blocks, past, shape):
    keep = check_blocks("cpu", "triton", blocks, past, **shape)
    assert shape.get("density", 0.5) == 1.0 or past == 0 or not keep[..., :past].all()


@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
def test_lists_are_the_kept_past_blocks_ascending(density):
    keep = torch.rand(2, 3, 4, 9, generator=torch.Generator().manual_seed(1)) < density
    lists, counts = block_lists(keep, 5 * BLOCK)
    for b, h, n in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4)).tolist():
        assert lists[b, h, n, : counts[b, h, n]].tolist() == [
            i for i in range(5 + n) if keep[b, h, n, i]
        ]
