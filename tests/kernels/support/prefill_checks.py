"""Check the prefill kernels: in plain torch (tests/kernels_cpu), interpreted (tests/kernels) and
compiled on a GPU (tests/cuda).

The rules are those of tests/kernels/support/kernel_checks.py: a float64 oracle that shares no code
with the kernels, at most twice plain torch's error, and NaN in all K and V that may not be read.
"""

from __future__ import annotations

import math

import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.prefill.block_sparse import BLOCK, attend_blocks
from kernels.prefill.sparse import prefill_sparse
from kernels.select.column_scores import column_scores
from tests.kernels.support.kernel_checks import assert_close, assert_scores, make_bank, plain


def make_queries(
    batch: int,
    chunk: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: str,
    generator: torch.Generator,
    sharpness: float = 1.0,
) -> torch.Tensor:
    """Make q [B, C, H, D], not contiguous: every second query of a longer chunk."""
    wide = sharpness * torch.randn(batch, 2 * chunk, heads, head_dim, generator=generator)
    return wide.to(dtype).to(device)[:, ::2]


def column_oracle(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """Sum over the queries the largest weight under any head: [n].

    q [C, H, D], k [Hkv, n, D], lse [C, H]; products in `dtype`.
    """
    k = k.to(dtype).repeat_interleave(q.shape[1] // k.shape[0], 0)
    logits = (
        torch.matmul(q.to(dtype).transpose(0, 1), k.transpose(1, 2)).to(
            torch.promote_types(dtype, torch.float32)
        )
        * scale
    )
    return torch.exp(logits - lse.t().unsqueeze(-1).to(logits.dtype)).amax(0).sum(0)


def check_column_scores(
    device: str,
    backend: str,
    chunk: int,
    stop: int,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    layout: str = "heads",
    batch: int = 2,
    sharpness: float = 1.0,
    blocks: list[tuple[int, int, int]] | None = None,
    stride: int = 1,
    seed: int = 0,
) -> torch.Tensor:
    """Check column_scores; K from the largest stop on is NaN, and the sums beyond each stop must
    stay as they were. Returns the sums.

    blocks: [(first, last, rows)] counted in the chunk, or None: the whole chunk over `stop` rows.
    """
    generator = torch.Generator().manual_seed(seed)
    scale, blocks = head_dim**-0.5, blocks or [(0, chunk, stop)]
    k, _ = make_bank(batch, kv_heads, stop + 19, head_dim, dtype, layout, device, generator)
    q = make_queries(batch, chunk, kv_heads * group, head_dim, dtype, device, generator, sharpness)
    # the queries also see rows that are not scored
    every = k.double().repeat_interleave(group, 1)
    lse = torch.logsumexp(torch.einsum("bchd,bhnd->bchn", q.double(), every) * scale, -1).float()
    k[:, :, stop:] = math.nan
    sums = torch.full((batch, len(blocks) + 1, stop + 19), 7.0, device=device)
    absolute = [(stop + first, stop + last, rows) for first, last, rows in blocks]
    column_scores(q, k, lse, absolute, stop, stride, scale, sums, backend=backend)
    assert (sums[:, len(blocks)] == 7.0).all(), "sums of no block were written"
    for b in range(batch):
        for n, (first, last, rows) in enumerate(blocks):
            assert (sums[b, n, rows:] == 7.0).all(), "sums beyond the scored rows were written"
            part = slice(first, last, stride)
            exact, rough = (
                column_oracle(q[b, part], k[b, :, :rows], lse[b, part], scale, kind)
                for kind in (torch.float64, dtype)
            )
            assert_scores(sums[b, n, :rows], exact, rough, f"sums of sequence {b}, block {n}")
    return sums


def check_prefill_sparse(
    device: str,
    backend: str,
    chunk: int,
    count: int,
    band: int,
    gap: int = 40,
    kv_heads: int = 2,
    group: int = 3,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    layout: str = "tokens",
    batch: int = 2,
    room: int = 5,
    sharpness: float = 1.0,
    edges: tuple[int, ...] = (),
    seed: int = 0,
) -> torch.Tensor:
    """Check prefill_sparse. Returns out.

    The chunk is cut into blocks at `edges`. Each block chooses up to `count` of the first
    count + gap rows; `band` rows lie between those and the chunk, and all bands begin at the same
    row. K and V that no block may read are NaN, and every index row ends in `room` entries of
    rubbish.
    """
    generator = torch.Generator().manual_seed(seed)
    scale, local = head_dim**-0.5, count + gap
    start = local + band
    k, v = make_bank(
        batch, kv_heads, start + chunk + 11, head_dim, dtype, layout, device, generator
    )
    q = make_queries(batch, chunk, kv_heads * group, head_dim, dtype, device, generator, sharpness)
    cuts = [0, *edges, chunk]
    blocks = [
        (start + first, start + last, local, max(0, count - n))
        for n, (first, last) in enumerate(zip(cuts, cuts[1:]))
    ]
    index = torch.full((batch, len(blocks), count + room), 2**30, dtype=torch.int32)
    for b in range(batch):
        for n, (*_, kept) in enumerate(blocks):
            index[b, n, :kept] = torch.randperm(local, generator=generator)[:kept].sort().values
    index = index.to(device)
    for b in range(batch):
        keep = torch.zeros(k.shape[2], dtype=torch.bool, device=device)
        keep[local : start + chunk] = True
        for n, (*_, kept) in enumerate(blocks):
            keep[index[b, n, :kept].long()] = True
        k[b, :, ~keep] = v[b, :, ~keep] = math.nan
    out = prefill_sparse(q, k, v, index, blocks, start, scale, backend=backend)
    assert out.shape == q.shape and out.dtype == dtype and torch.isfinite(out).all()
    for n, (first, last, local, kept) in enumerate(blocks):
        visible = [kept + position + 1 - local for position in range(first, last)]
        for b in range(batch):
            rows = [
                torch.cat([t[b].index_select(1, index[b, n, :kept].long()), t[b, :, local:last]], 1)
                for t in (k, v)
            ]
            queries = q[b, first - start : last - start]
            exact, _ = plain(queries, *rows, visible, scale, torch.float64)
            rough = [
                plain(queries, *rows, visible, scale, dtype)[0],
                fused(queries, *rows, visible, scale),
            ]
            rough = max(rough, key=lambda t: (t.double() - exact).abs().max().item())
            assert_close(
                out[b, first - start : last - start],
                exact,
                rough,
                dtype,
                f"out of sequence {b}, block {n}",
            )
    return out


def check_blocks(
    device: str,
    backend: str,
    blocks: int,
    past: int,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 32,
    dtype: torch.dtype = torch.float32,
    layout: str = "heads",
    batch: int = 1,
    density: float = 0.5,
    sharpness: float = 1.0,
    seed: int = 0,
) -> torch.Tensor:
    """Check attend_blocks on `blocks` blocks of queries after `past` blocks of rows. Returns keep.

    Every head keeps a random share of the blocks (density 0: its own block only, 1: everything).
    Blocks that no query head of a K/V head keeps hold NaN, and so do rows past the chunk.
    """
    generator = torch.Generator().manual_seed(seed)
    scale, first, chunk, heads = head_dim**-0.5, past * BLOCK, blocks * BLOCK, kv_heads * group
    k, v = make_bank(batch, kv_heads, first + chunk + 9, head_dim, dtype, layout, device, generator)
    q = make_queries(batch, chunk, heads, head_dim, dtype, device, generator, sharpness)
    keep = torch.rand(batch, heads, blocks, past + blocks, generator=generator) < density
    own = past + torch.arange(blocks)
    keep &= torch.arange(past + blocks) <= own.unsqueeze(1)
    keep[:, :, torch.arange(blocks), own] = True
    read = (
        keep.view(batch, kv_heads, group, blocks, -1)
        .any(3)
        .any(2)
        .repeat_interleave(BLOCK, -1)
        .to(device)
    )
    for side in (k, v):
        side[:, :, : first + chunk].masked_fill_(~read.unsqueeze(-1), math.nan)
        side[:, :, first + chunk :] = math.nan
    out, lse = attend_blocks(q, k, v, keep.to(device), first, scale, backend=backend)
    assert out.shape == q.shape and out.dtype == dtype and torch.isfinite(out).all()
    for b in range(batch):
        for head in range(heads):
            for n in range(blocks):
                chosen = keep[b, head, n].nonzero().flatten().tolist()
                rows = [
                    torch.cat([t[b, head // group, i * BLOCK : (i + 1) * BLOCK] for i in chosen])[
                        None
                    ]
                    for t in (k, v)
                ]
                visible = [(len(chosen) - 1) * BLOCK + j + 1 for j in range(BLOCK)]
                part, what = (
                    slice(n * BLOCK, (n + 1) * BLOCK),
                    f"out of sequence {b}, head {head}, block {n}",
                )
                queries = q[b, part, head : head + 1]
                exact, logits = plain(queries, *rows, visible, scale, torch.float64)
                rough = [
                    plain(queries, *rows, visible, scale, dtype)[0],
                    fused(queries, *rows, visible, scale),
                ]
                rough = max(rough, key=lambda t: (t.double() - exact).abs().max().item())
                assert_close(out[b, part, head : head + 1], exact, rough, dtype, what)
                wanted, sums = torch.logsumexp(logits[:, 0], -1), lse[b, part, head].double()
                assert (sums - wanted).abs().max() <= 4e-6 * wanted.abs().max() + 1e-6, (
                    f"log-sum-exp of {what}"
                )
    return keep


def fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: list[int], scale: float
) -> torch.Tensor:
    """Run torch's fused attention with a mask: plain torch too, and less exact in float32 (its
    exponential).
    """
    mask = torch.arange(k.shape[1], device=q.device) < torch.tensor(
        visible, device=q.device
    ).unsqueeze(1)
    q, k, v = (t[None] for t in (q.transpose(0, 1), k, v))
    return scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=True)[0].transpose(
        0, 1
    )
