"""Checks of the prefill kernels that run twice: in plain torch (tests/kernels_cpu) and interpreted (tests/kernels); on a GPU compiled.

The rules of tests/kernel_checks.py: a float64 oracle that shares no code with the kernels, at most twice plain torch's error, and NaN in
every row that may not be read.
"""

import math

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.column_scores import column_scores
from kernels.sparse_prefill import prefill_sparse
from tests.kernel_checks import assert_close, assert_keys, make_bank, plain


def make_queries(batch, chunk, heads, head_dim, dtype, device, generator, sharpness=1.0):
    """q [B, C, H, D], not contiguous: every second query of a longer chunk."""
    wide = sharpness * torch.randn(batch, 2 * chunk, heads, head_dim, generator=generator)
    return wide.to(dtype).to(device)[:, ::2]


def column_oracle(q, k, lse, scale, dtype):
    """[n] sums over queries of the largest weight under any head. q [C, H, D], k [Hkv, n, D], lse [C, H]; products in `dtype`."""
    k = k.to(dtype).repeat_interleave(q.shape[1] // k.shape[0], 0)
    logits = torch.matmul(q.to(dtype).transpose(0, 1), k.transpose(1, 2)).to(torch.promote_types(dtype, torch.float32)) * scale
    return torch.exp(logits - lse.t().unsqueeze(-1).to(logits.dtype)).amax(0).sum(0)


def check_column_scores(device, path, chunk, stop, kv_heads=2, group=3, head_dim=32, dtype=torch.float32, layout="heads", batch=2,
                        sharpness=1.0, seed=0):
    """column_scores against the oracle; rows from `stop` on are NaN and their sums stay as they were."""
    generator = torch.Generator().manual_seed(seed)
    scale = head_dim ** -0.5
    k, _ = make_bank(batch, kv_heads, stop + 19, head_dim, dtype, layout, device, generator)
    q = make_queries(batch, chunk, kv_heads * group, head_dim, dtype, device, generator, sharpness)
    every = k.double().repeat_interleave(group, 1)                   # the queries also see rows that are not scored
    lse = torch.logsumexp(torch.einsum("bchd,bhnd->bchn", q.double(), every) * scale, -1).float()
    k[:, :, stop:] = math.nan
    sums = torch.full((batch, stop + 19), 7.0, device=device)
    column_scores(q, k, lse, stop, scale, sums, path=path)
    assert (sums[:, stop:] == 7.0).all(), "sums beyond the scored rows were written"
    for b in range(batch):
        rows = k[b, :, :stop]
        exact, rough = (column_oracle(q[b], rows, lse[b], scale, kind) for kind in (torch.float64, dtype))
        assert_keys(sums[b, :stop], exact, rough, f"sums of sequence {b}")
    return sums


def check_prefill_sparse(device, path, chunk, count, band, gap=40, kv_heads=2, group=3, head_dim=32, dtype=torch.float32, layout="tokens",
                         batch=2, room=5, sharpness=1.0, seed=0):
    """prefill_sparse against the oracle. `count` of count + gap rows are chosen, `band` rows lie between them and the chunk; every
    other row is NaN, and the index row has `room` entries of rubbish at its end."""
    generator = torch.Generator().manual_seed(seed)
    scale, local = head_dim ** -0.5, count + gap
    start = local + band
    stop = start + chunk
    k, v = make_bank(batch, kv_heads, stop + 11, head_dim, dtype, layout, device, generator)
    q = make_queries(batch, chunk, kv_heads * group, head_dim, dtype, device, generator, sharpness)
    index = torch.full((batch, count + room), 2**30, dtype=torch.int32)
    for b in range(batch):
        index[b, :count] = torch.randperm(local, generator=generator)[:count].sort().values
    index = index.to(device)
    keep = torch.zeros(batch, stop + 11, dtype=torch.bool, device=device)
    keep.scatter_(1, index[:, :count].long(), True)
    keep[:, local:stop] = True
    for b in range(batch):
        k[b, :, ~keep[b]] = v[b, :, ~keep[b]] = math.nan
    out = prefill_sparse(q, k, v, index, count, local, start, scale, path=path)
    assert out.shape == q.shape and out.dtype == dtype and torch.isfinite(out).all()
    visible = [count + band + i + 1 for i in range(chunk)]
    for b in range(batch):
        rows = [torch.cat([t[b].index_select(1, index[b, :count].long()), t[b, :, local:stop]], 1) for t in (k, v)]
        exact, _ = plain(q[b], *rows, visible, scale, torch.float64)
        rough = [plain(q[b], *rows, visible, scale, dtype)[0], fused(q[b], *rows, visible, scale)]
        rough = max(rough, key=lambda t: (t.double() - exact).abs().max().item())
        assert_close(out[b], exact, rough, dtype, f"out of sequence {b}")
    return out


def fused(q, k, v, visible, scale):
    """torch's own fused attention with a mask: plain torch as well, and less exact in float32 (its exponential)."""
    mask = torch.arange(k.shape[1], device=q.device) < torch.tensor(visible, device=q.device).unsqueeze(1)
    q, k, v = (t[None] for t in (q.transpose(0, 1), k, v))
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)
