"""Chunked prefill attention on a CPU against the float64 oracle, and its log-sum-exp."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import kernels.prefill
from kernels.prefill import prefill_dense, prefill_dense_lse
from tests.kernel_checks import EPSILON, make_bank, plain


def fused(q, k, v, start, scale):
    """Run torch's fused attention with a mask: plain torch too, and less exact in float32 (its
    exponential).
    """
    mask = torch.ones(len(q), k.shape[1], dtype=torch.bool).tril(start)
    return scaled_dot_product_attention(
        q.transpose(0, 1)[None], k[None], v[None], mask, scale=scale, enable_gqa=True
    )[0].transpose(0, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["heads", "tokens"])
@pytest.mark.parametrize(
    "chunk, start", [(1, 0), (1, 300), (7, 0), (64, 1), (63, 65), (130, 131), (200, 613)]
)
def test_chunk_and_past(dtype, layout, chunk, start, monkeypatch):
    monkeypatch.setattr(kernels.prefill, "PAST_BLOCK", 256)
    for kv_heads, group, dim in ((2, 1, 32), (2, 3, 64), (1, 8, 96)):
        generator = torch.Generator().manual_seed(chunk + start)
        k, v = make_bank(2, kv_heads, start + chunk + 9, dim, dtype, layout, "cpu", generator)
        k[:, :, start + chunk :] = v[:, :, start + chunk :] = float("nan")
        q = torch.randn(2, chunk, kv_heads * group, dim, generator=generator).to(dtype)
        out, lse = prefill_dense_lse(q, k, v, start, dim**-0.5)
        assert (
            torch.equal(out, prefill_dense(q, k, v, start, dim**-0.5, backend="cpu"))
            and out.dtype == dtype
        )
        for b in range(2):
            own = k[b, :, : start + chunk], v[b, :, : start + chunk]
            visible = list(range(start + 1, start + chunk + 1))
            exact, logits = plain(q[b], *own, visible, dim**-0.5, torch.float64)
            rough = [
                plain(q[b], *own, visible, dim**-0.5, dtype)[0],
                fused(q[b], *own, start, dim**-0.5),
            ]
            own_error = max((t.double() - exact).abs().max().item() for t in rough)
            error = (out[b].double() - exact).abs().max().item()
            assert error <= 2 * own_error + 4 * EPSILON[dtype] * exact.abs().max().item()
            assert torch.allclose(
                lse[b].double(), torch.logsumexp(logits, -1), atol=2e-4, rtol=1e-5
            )
