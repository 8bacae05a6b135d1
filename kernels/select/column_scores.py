"""Score how much each block of queries reads each token of the past, for OmniKV's sparse prefill.

S_i = sum over a block's queries of max over heads of softmax(q . k_i): OmniKV section D.10 with Eq.
3-4 and uniform weights. q . k is computed again and normalised by the log-sum-exp that the dense
pass left; one number per row and block leaves the kernel. The exponential is monotone, so the
largest (logit - lse) over the heads is found first: one exponential per (query, row).
"""

from __future__ import annotations

import torch

from kernels.launch.dispatch import choose
from kernels.launch.isa import multiplies
from kernels.launch.on_device import on_device
from kernels.launch.shapes import Card, Config, card, power_of_two
from kernels.launch.softmax import PLAIN, Softmax, capped
from kernels.launch.triton import tl, triton
from kernels.rows.forms import is_packed, key_floats, stored_queries, unpack_keys
from kernels.rows.int4_tiles import columns
from kernels.rows.tiles import load_keys, scaled_logits
from kernels.select.window.native import score_columns, scores_window

# rows per block on a CPU: the block's logits (4 B x C x G x ROWS, 3 MB at C = 256, G = 3) stay near
# the cache
ROWS = 1024


def column_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    blocks: list[tuple[int, int, int]],
    start: int,
    stride: int,
    scale: float,
    sums: torch.Tensor,
    backend: str = "auto",
    softmax: Softmax = PLAIN,
) -> None:
    """Set sums[b, n, i] to the sum over block n's queries of the max over heads of exp(q . k_i *
    scale - lse), for rows i below the block's stop.

    q [B, C, H, D]: queries at positions start .. start+C-1; k [B, Hkv, T, D] view of any strides,
    last dim contiguous; lse [B, C, H] float32: log-sum-exp over everything the query sees
    (`prefill_dense_lse`); blocks: tuples (first, last, stop): queries at positions first, first +
    stride, .. below last score rows 0 .. stop-1, stop <= first; sums [B, >= len(blocks), T]
    float32; softmax: its cap on logits (sinks are in lse). Mutates sums below each stop, and
    nothing beyond. Raises ValueError for an unknown backend.
    """
    chosen = choose(backend, q, lambda: scores_window(q, k))
    if chosen == "triton":
        column_scores_triton(q, k, lse, blocks, start, stride, scale, sums, softmax)
        return
    forms = {"native": _column_scores_native, "cpu": column_scores_cpu}
    score = forms.get(chosen, column_scores_ref)
    for n, (first, last, stop) in enumerate(blocks):
        part = slice(first - start, last - start, stride)
        score(q[:, part], k, lse[:, part], stop, scale, sums[:, n], softmax)


def _column_scores_native(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    stop: int,
    scale: float,
    sums: torch.Tensor,
    softmax: Softmax,
) -> None:
    """One block by the C++ kernel, arguments as `column_scores_ref`."""
    for b in range(len(q)) if stop and q.shape[1] else ():
        score_columns(q[b], k[b, :, :stop], lse[b], scale, sums[b, :stop], softmax.cap)


def column_scores_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    stop: int,
    scale: float,
    sums: torch.Tensor,
    softmax: Softmax = PLAIN,
) -> None:
    """Reference of one block: q [B, C, H, D], lse [B, C, H], sums [B, T]; holds every weight."""
    batch, chunk, heads, dim = q.shape
    kv_heads = k.shape[1]
    folded = q.float().reshape(batch, chunk, kv_heads, heads // kv_heads, dim)
    logits = torch.einsum("bchgd,bhnd->bchgn", folded, key_floats(k[:, :, :stop])) * scale
    weights = torch.exp(softmax.capped(logits) - lse.reshape(batch, chunk, kv_heads, -1, 1))
    sums[:, :stop] = weights.flatten(2, 3).amax(2).sum(1)


def column_scores_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    stop: int,
    scale: float,
    sums: torch.Tensor,
    softmax: Softmax = PLAIN,
) -> None:
    """One block in plain torch, arguments as `column_scores_ref`: ROWS rows of the past at a time,
    one K/V head after the other, in float32 where the CPU would emulate the product.
    """
    batch, chunk, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    wide = not multiplies(q.dtype)
    for b in range(batch):
        folded = (
            q[b]
            .reshape(chunk, kv_heads, group, dim)
            .permute(1, 2, 0, 3)
            .reshape(kv_heads, group * chunk, dim)
        )
        folded = folded.float() if wide else folded
        shift = -lse[b].t().reshape(kv_heads, group * chunk, 1)
        for first in range(0, stop, ROWS):
            last = min(stop, first + ROWS)
            best = None
            for h in range(kv_heads):
                rows = unpack_keys(k[b, h, first:last], folded.dtype)
                logits = torch.mm(folded[h], (rows.float() if wide else rows).t())
                # float32, whatever the product's dtype
                if softmax.cap:
                    most = softmax.capped(logits.float() * scale).add_(shift[h])
                else:
                    most = torch.add(shift[h], logits, alpha=scale)
                most = most.view(group, chunk, -1).amax(0) if group > 1 else most
                best = most if best is None else torch.maximum(best, most, out=best)
            if best is not None:
                sums[b, first:last] = best.exp_().sum(0)


@triton.jit
def column_kernel(
    q,
    k,
    lse,
    blocks,
    sums,
    scale,
    count,
    kv_heads,
    group,
    sqb,
    sqc,
    sqh,
    skb,
    skh,
    skt,
    slb,
    slc,
    slh,
    ssb,
    ssn,
    stride,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    CAP: tl.constexpr,
):
    """Score one tile of N rows for one block of queries: grid (tiles, blocks * B).

    Heads are the inner loop, queries the outer: the maximum over all heads comes before the sum
    over queries. `group` is no constant: unrolled, the heads of a group make sm_80 spill. blocks
    [count, 3] int32: (first query, past the last, rows), queries counted in q.
    """
    n = tl.program_id(1) % count
    b = (tl.program_id(1) // count).to(tl.int64)
    first = tl.load(blocks + 3 * n)
    last = tl.load(blocks + 3 * n + 1)
    stop = tl.load(blocks + 3 * n + 2)
    row = tl.program_id(0) * N
    if row < stop:
        t = row + tl.arange(0, N)
        d = columns(k, D, DP)
        k += b * skb
        place_k = t.to(tl.int64)
        seen = t < stop
        like = tl.zeros([1], q.dtype.element_ty)
        rows_at = q + b * sqb + d[None, :]
        shift_at = lse + b * slb
        total = tl.zeros([N], tl.float32)
        for c in range(first, last, M * stride):
            at = c + tl.arange(0, M) * stride
            live = at < last
            place = at.to(tl.int64)[:, None] * sqc
            best = tl.full([M, N], float("-inf"), tl.float32)
            for h in range(0, kv_heads):
                keys = k + tl.cast(h, tl.int64) * skh
                tile = load_keys(keys, place_k, skt, d, seen, like, D)
                for g in range(0, group):
                    head = h * group + g
                    rows = tl.load(
                        rows_at + place + head * sqh,
                        mask=live[:, None] & (d < D)[None, :],
                        other=0.0,
                    )
                    shift = (
                        tl.load(shift_at + at * slc + head * slh, mask=live, other=0.0)
                        * 1.4426950408889634
                    )
                    x = tl.dot(rows, tl.trans(tile), input_precision="ieee") * (
                        scale * 1.4426950408889634
                    )
                    # in units of log2(e), and so is the cap
                    x = capped(scaled_logits(x, keys, place_k, skt, seen, D), CAP)
                    best = tl.maximum(best, x - shift[:, None])
            total += tl.sum(tl.where(live[:, None], tl.exp2(best), 0.0), 0)
        tl.store(sums + b * ssb + n * ssn + t, total, mask=t < stop)


# heads of 256: told so, ptxas takes 153 to 224; left alone it aims at 128 on sm_89 and spills, and
# so it does of packed rows (triton 3.6.0 on sm_89 and sm_120, both on sm_110: up to 72 bytes)
WIDE_REGISTERS = 224


def column_config(
    head_dim: int, itemsize: int, rows: torch.dtype | None = None, found: Card | None = None
) -> Config:
    """Choose 64 queries x 128 rows in 16 bits under 8 warps.

    Two score tiles (best and new) take 64 registers; with 128 queries sm_80 and sm_89 spill up to
    200 bytes. Tiles are smaller in float32, where products take registers, and of packed rows, of
    which 128 spill on sm_89 and sm_100, and 64 of 6 bits on sm_89. At group 4 a product of 2.1
    MFLOP reads 24 KB. rows: the dtype of K where it is packed; found: the card, if there is one, of
    which those of capability 12 spill 8 bytes of 128 rows. Wider heads than 256 have smaller tiles,
    for 64 KB of shared memory: 64 rows of 512 would take 128, which sm_89 has not.
    """
    dim = max(16, power_of_two(head_dim))
    if itemsize == 4 or dim > 128:
        side = 32 if itemsize == 4 and dim > 64 else 64
        side = max(16, side * 256 // dim) if dim > 256 else side
        # heads of 256 under 4 warps and a cap: 80 bytes of spills on sm_100
        warps = 4 if itemsize == 4 else 8
        return Config(side, side, dim, warps=warps, stages=2, queries=side)
    whole = 64 if found is not None and found.capability[0] == 12 else 128
    block = whole if rows is None else 32 if rows == torch.uint8 else 64
    return Config(block, 64, dim, warps=8, stages=2, queries=64)


def column_scores_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    blocks: list[tuple[int, int, int]],
    start: int,
    stride: int,
    scale: float,
    sums: torch.Tensor,
    softmax: Softmax = PLAIN,
) -> None:
    """`column_scores` by the Triton kernel of this file, same arguments: one launch for all blocks.

    Bytes: K once per block of queries, the block's queries once per tile of rows (from L2), 4 bytes
    written per row and block.
    """
    batch, _, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    config = column_config(
        head_dim, q.element_size(), k.dtype if is_packed(k) else None, card(q.device)
    )
    q = stored_queries(q, k)
    table = on_device(
        [(first - start, last - start, stop) for first, last, stop in blocks], torch.int32, q.device
    )
    tiles = -(-max(1, max(stop for *_, stop in blocks)) // config.block)
    bounded = config.warps == 8 and (config.dim > 128 or _told(k))
    column_kernel[(tiles, len(blocks) * batch)](
        q,
        k,
        lse,
        table,
        sums,
        scale,
        len(blocks),
        kv_heads,
        heads // kv_heads,
        *q.stride()[:3],
        *k.stride()[:3],
        *lse.stride(),
        *sums.stride()[:2],
        stride,
        M=config.rows,
        N=config.block,
        D=head_dim,
        DP=config.dim,
        CAP=softmax.cap * 1.4426950408889634,
        num_warps=config.warps,
        num_stages=config.stages,
        **(dict(maxnreg=WIDE_REGISTERS) if bounded and torch.version.hip is None else {}),
    )


def _told(k: torch.Tensor) -> bool:
    """Tell whether ptxas is told how many registers rows of K [B, Hkv, T, ..] may take: packed ones
    of 8 bits on capability 8, all packed ones on 11, and all rows on 12.
    """
    found = card(k.device)
    if found is None or not (is_packed(k) or found.capability[0] == 12):
        return False
    major = found.capability[0]
    return major >= 11 or (major == 8 and k.dtype != torch.uint8)
