"""Kernels over packed rows, and products of few rows and few bits, compiled and run on a GPU: the
checks of tests/kernels at real sizes. Skipped without a GPU.
"""

import pytest
import torch

from kernels.layer.gemv import multiply_rows, multiply_rows_ref
from tests.kernels.support import kernel_checks, prefill_checks
from tests.kernels.support.kernel_checks import assert_close
from tests.kernels.support.packed_rows import over_packed_rows
from tools.gpu.few_bits import few_bits

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
BF16 = torch.bfloat16
PACKED = {"int8": torch.int8, "int4": torch.uint8, "fp8": torch.float8_e4m3fn}


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("head_dim, group, queries", [(64, 8, 1), (128, 4, 1), (128, 4, 8)])
def test_a_steps_attention(form, head_dim, group, queries, monkeypatch):
    names = ("decode_dense", "decode_sparse", "window_scores")
    seen = over_packed_rows(monkeypatch, kernel_checks, *names, form=PACKED[form])
    shape = dict(head_dim=head_dim, group=group, dtype=BF16, layout="tokens")
    lengths = [1, 64, 2039]
    kernel_checks.check_dense("cuda", "triton", lengths, kind="softmax", queries=queries, **shape)
    kernel_checks.check_sparse("cuda", "triton", [33, 1000], [5, 300], queries=queries, **shape)
    kernel_checks.check_window("cuda", "triton", [17, 1500], window=16, kind="softmax", **shape)
    assert set(seen) == {PACKED[form]}


@pytest.mark.parametrize("form", PACKED)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_prompts_attention(form, head_dim, monkeypatch):
    names = ("column_scores", "prefill_sparse", "attend_blocks")
    seen = over_packed_rows(monkeypatch, prefill_checks, *names, form=PACKED[form])
    shape = dict(group=4, head_dim=head_dim, dtype=BF16, batch=1)
    prefill_checks.check_column_scores("cuda", "triton", 300, 1500, **shape)
    prefill_checks.check_prefill_sparse("cuda", "triton", 300, 256, 129, **shape)
    prefill_checks.check_blocks("cuda", "triton", 2, 8, density=0.4, **shape)
    assert set(seen) == {PACKED[form]}


@pytest.mark.parametrize("dtype", [torch.float16, BF16])
@pytest.mark.parametrize("rows", [1, 2, 3, 8])
@pytest.mark.parametrize("outputs, inputs", [(576, 576), (4096, 4096), (1030, 14336)])
def test_products_of_few_rows(dtype, rows, outputs, inputs):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(1, rows, inputs, generator=generator).to(dtype).cuda()
    weight = (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(dtype).cuda()
    residual = torch.randn(1, rows, outputs, generator=generator).to(dtype).cuda()
    found = multiply_rows(x, weight, residual=residual)
    exact = multiply_rows_ref(x.double(), weight.double(), residual=residual.double())
    assert_close(found, exact, multiply_rows_ref(x, weight, residual=residual), dtype, "product")


def test_products_of_few_bits():
    checks, _ = few_bits(True, "cuda", BF16, 1e12, lambda row: None)
    assert checks and all(row["ok"] for row in checks.values()), checks
