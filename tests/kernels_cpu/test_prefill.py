"""Chunked prefill attention on a CPU against the float64 oracle, and its log-sum-exp."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

import kernels.prefill.dense
from engine.bank.host.streamed_attention import attend_stream
from engine.plan.placement import STREAM_BLOCK
from kernels.launch.shapes import Card, imagined
from kernels.prefill.dense import prefill_dense, prefill_dense_lse
from tests.kernels.support.kernel_checks import EPSILON, make_bank, plain

pytestmark = pytest.mark.usefixtures("form")


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
    monkeypatch.setattr(kernels.prefill.dense, "PAST_BLOCK", 256)
    for kv_heads, group, dim in ((2, 1, 32), (2, 3, 64), (1, 8, 96)):
        generator = torch.Generator().manual_seed(chunk + start)
        k, v = make_bank(2, kv_heads, start + chunk + 9, dim, dtype, layout, "cpu", generator)
        k[:, :, start + chunk :] = v[:, :, start + chunk :] = float("nan")
        q = torch.randn(2, chunk, kv_heads * group, dim, generator=generator).to(dtype)
        out, lse = prefill_dense_lse(q, k, v, start, dim**-0.5)
        assert torch.equal(out, prefill_dense(q, k, v, start, dim**-0.5)) and out.dtype == dtype
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


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 128 to 512 rows of a GPU with cuDNN (faked)."""
    for name, rows in (("CUDNN_BLOCK", 128), ("COPIED_BLOCK", 256), ("LARGEST_BLOCK", 512)):
        monkeypatch.setattr(kernels.prefill.dense, name, rows)
    monkeypatch.setattr(kernels.prefill.dense, "has_cudnn", lambda *_: True)


def cut(start, cudnn=True, packed=False):
    return kernels.prefill.dense.past_parts(start, False, cudnn, packed)


@settings(max_examples=200)
@given(st.integers(0, 1 << 20), st.booleans(), st.booleans())
def test_a_past_of_a_million_has_seven_shapes_and_few_parts(start, cudnn, packed):
    parts = cut(start, cudnn, packed)
    # every row once, in order
    assert [stop for _, stop, _ in parts[:-1]] == [first for first, _, _ in parts[1:]]
    assert (parts[0][0], parts[-1][1]) == (0, start) if start else parts == []
    sizes = [stop - first for first, stop, by_cudnn in parts if by_cudnn]
    assert set(sizes) <= {8192 << i for i in range(3 if packed else 7)}
    assert sizes == sorted(sizes, reverse=True)
    if packed:
        assert all(stop - first <= 32768 for first, stop, _ in parts)
    elif cudnn:
        assert start - sum(sizes) < 8192, "the flash kernel reads less than the smallest block"
        # a million itself is the largest block twice
        assert len(parts) <= (start // 8192).bit_count() + 1 + (start == 1 << 20)
    else:
        assert len(parts) == bool(start)


def test_deeper_pasts_repeat_the_largest_block():
    sizes = [stop - first for first, stop, _ in cut((4 << 20) + 8192 + 5)]
    assert sizes == [8192 << 6] * 8 + [8192, 5]


@pytest.mark.parametrize("start", [0, 1, 127, 128, 129, 1000, 1024])
def test_the_past_is_read_once_and_cudnn_sees_few_shapes(start, monkeypatch, small_blocks):
    """On sm_90 (faked): blocks by cuDNN, the rest and the chunk by the flash kernel."""
    calls = []

    def cudnn(q, k, v, bias, wants_lse, dropout, causal, mask, scale):
        assert wants_lse and not causal  # its causal mask is aligned to the first row
        calls.append(("cudnn", k.shape[2]))
        return torch.empty_like(q), q.new_empty(*q.shape[:3], 1, dtype=torch.float32)

    def flash(q, k, v, dropout, causal, scale):
        calls.append(("flash causal" if causal else "flash", k.shape[2]))
        return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)

    monkeypatch.setattr(kernels.prefill.dense, "_cudnn_cuda", cudnn)
    monkeypatch.setattr(kernels.prefill.dense, "_flash_cuda", flash)
    q = torch.empty(1, 64, 8, 64, dtype=torch.bfloat16, device="meta")
    k, v = torch.empty(2, 1, 2, start + 64, 64, dtype=torch.bfloat16, device="meta")
    out, lse = prefill_dense_lse(q, k, v, start, 0.125)
    assert out.shape == q.shape and lse.shape == q.shape[:3]
    blocks = {0: [], 1: [], 127: [], 128: [128], 129: [128], 1000: [512, 256, 128]}
    expected = [("cudnn", rows) for rows in blocks.get(start, [512, 512])]
    rest = start % 128
    assert calls == [("flash causal", 64), *expected, *[("flash", rest)] * (rest > 0)]


def test_a_stream_block_is_one_call_of_cudnn(monkeypatch, small_blocks):
    """An offloaded layer's past comes in blocks that cuDNN reads whole; the last one is flash's."""
    assert STREAM_BLOCK == 32768
    calls = []

    def fused(q, k, v, causal, scale, cudnn=False):
        calls.append((k.shape[2], causal, cudnn))
        return torch.zeros_like(q), q.new_zeros(q.shape[:3], dtype=torch.float32)

    monkeypatch.setattr(kernels.prefill.dense, "fused", fused)
    q = torch.empty(1, 64, 8, 64, dtype=torch.bfloat16, device="meta")
    rows = torch.empty(2, 1, 2, 400, 64, dtype=torch.bfloat16, device="meta")

    class Streamed:
        def blocks(self, layer, start, stop, size=None, ahead=True):
            for first in range(start, stop, 128):
                part = slice(first, min(stop, first + 128))
                yield first, rows[0, :, :, part], rows[1, :, :, part]

        def newest_rows(self, layer, first, stop):
            return rows[0, :, :, first:stop], rows[1, :, :, first:stop]

    attend_stream(q, Streamed(), 0, 300, 0.125)
    past = [(128, False, True), (128, False, True), (44, False, False)]
    assert calls == [*past, (64, True, False)]


def test_no_cudnn_without_a_new_card_or_in_float32(monkeypatch):
    has, card, tried = kernels.prefill.dense.has_cudnn, torch.device("cuda", 0), []
    fresh = kernels.prefill.dense._runs_cudnn.__wrapped__
    monkeypatch.setattr(kernels.prefill.dense, "_runs_cudnn", fresh)
    monkeypatch.setattr(kernels.prefill.dense, "_cudnn_cuda", lambda *a, **b: tried.append(a))
    monkeypatch.setattr(torch, "zeros", lambda *a, **b: None)
    assert not has(card, torch.bfloat16, 128)
    with imagined(Card((9, 0))):
        assert has(card, torch.bfloat16, 128) and len(tried) == 1
        assert not has(card, torch.float32, 128) and not has(card, torch.bfloat16, 256)

    def missing(*a, **b):
        raise RuntimeError("cuDNN: no engine for this operation")

    with imagined(Card((8, 9))):
        assert not has(card, torch.bfloat16, 128) and len(tried) == 1
    monkeypatch.setattr(kernels.prefill.dense, "_cudnn_cuda", missing)
    with imagined(Card((9, 0))):
        assert not has(card, torch.bfloat16, 128)
