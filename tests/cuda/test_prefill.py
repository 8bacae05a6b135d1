"""The prefill kernels compiled and run on a GPU: the checks of tests/kernels/test_prefill.py at
real sizes. Skipped without a GPU.
"""

import pytest
import torch

from tests.kernels.support.prefill_checks import (
    check_blocks,
    check_column_scores,
    check_prefill_sparse,
)

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def exact_products():
    """The plain torch beside the kernels must not use TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group, head_dim", [(1, 64), (4, 128), (8, 128), (3, 80)])
def test_prefill_kernels(dtype, group, head_dim):
    shape = dict(group=group, head_dim=head_dim, dtype=dtype, batch=1)
    check_column_scores(
        "cuda",
        "triton",
        600,
        3001,
        blocks=[(0, 256, 3001), (256, 512, 2000), (512, 600, 1)],
        stride=3,
        **shape,
    )
    check_prefill_sparse("cuda", "triton", 600, 512, 257, edges=(256, 512), **shape)
    check_blocks("cuda", "triton", 4, 20, density=0.3, **shape)


def test_a_block_sparse_chunk_of_an_8b():
    check_blocks(
        "cuda",
        "triton",
        32,
        100,
        kv_heads=8,
        group=4,
        head_dim=128,
        dtype=torch.bfloat16,
        density=0.2,
    )
