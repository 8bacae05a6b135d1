"""Mamba-2's recurrence over a prompt on a GPU: the chunk-wise form (arXiv 2405.21060, section 6).

Two launches for SEGMENT chunks. The first takes every chunk and head by itself: with p the log
decays summed over the chunk, it leaves the products of c and b under their decays, and what tokens
are multiplied by. The second goes from chunk to chunk, a program for a few columns of S, and needs
products alone:

    y = exp(p) c S + (c . b decayed) (dt x) + skip x,   S = exp(p_last) S + b^T exp(p_last - p) dt x

A head may forget all in one token and little in the next, and a difference of two large sums has
lost the small ones. So decays are summed in two parts: multiples of 2^-10, whose sums over a chunk
float32 has exactly, and what is left of each.
"""

from __future__ import annotations

import torch

from kernels.launch.shapes import power_of_two
from kernels.launch.triton import tl, triton
from kernels.recurrent.chunk import (
    CHUNK,
    COLUMNS,
    PART,
    REGISTERS,
    SEGMENT,
    chunk_for,
    precision,
    product,
    rows_of,
    tokens_of_chunk,
)

MOST_DIM = 256  # of a state; Falcon-H1 has that


def ssd_chunk_triton(
    c: torch.Tensor,
    b: torch.Tensor,
    x: torch.Tensor,
    g: torch.Tensor,
    dt: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    keep: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ssd_chunk` of kernels/recurrent/ssd.py, same arguments: (y, S after the first N - keep
    tokens).
    """
    batch, count, heads, dh = x.shape
    whole, chunk = count - keep, chunk_for(b.device)
    # torch's convolution leaves channel after channel
    c, b, x = (t if t.stride()[2:] == (t.shape[3], 1) else t.contiguous() for t in (c, b, x))
    out = torch.empty(batch, count, heads, dh, dtype=torch.float32, device=x.device)
    step = chunk * SEGMENT
    # the tokens that are kept go with the last whole ones
    for first in range(0, max(whole, 1), step):
        ended = whole - first <= step
        part = slice(first, count if ended else first + step)
        tokens = c[:, part], b[:, part], x[:, part], g[:, part], dt[:, part]
        state = _segment(*tokens, skip, state, out[:, part], keep if ended else 0, chunk)
    return out, state


def _segment(
    c: torch.Tensor,
    b: torch.Tensor,
    x: torch.Tensor,
    g: torch.Tensor,
    dt: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
    keep: int,
    chunk: int,
) -> torch.Tensor:
    """Run some chunks of `chunk` tokens into out: S after all tokens but `keep`."""
    (batch, count, groups, ds), (heads, dh) = b.shape, x.shape[2:]
    whole = count - keep
    wholes = -(-whole // chunk)
    chunks = wholes + -(-keep // chunk)
    g, dt, state = g.contiguous(), dt.contiguous(), state.contiguous()
    after = torch.empty_like(state) if whole else state.clone()
    asked = out.new_empty(batch, heads, chunks, chunk, chunk)
    factors = out.new_empty(batch, heads, chunks, 3, chunk)
    sizes = whole, count, wholes, heads // groups, *b.stride()[:2], *c.stride()[:2]
    shape = dict(ds=ds, CHUNK=chunk, PRECISION=precision(), num_stages=1, num_warps=4)
    asked_kernel[(chunks, heads, batch)](
        c, b, g, dt, asked, factors, *sizes, ds, **shape, PART=PART
    )  # fmt: skip
    columns, tile = (max(16, power_of_two(d)) for d in (min(COLUMNS, dh), min(chunk, ds)))
    told = dict(maxnreg=REGISTERS) if chunk < CHUNK else {}
    ssd_chunk_kernel[(-(-dh // columns), heads, batch)](
        c, b, x, skip, asked, factors, state, out, after, *sizes, *x.stride()[:2],
        *out.stride()[:2], chunks, **shape, TILE=tile, dh=dh, COLUMNS=columns, **told,
    )  # fmt: skip
    return after


@triton.jit
def summed(g):
    """Sum decays [CHUNK], at most 0, up to each token: (multiples of 2^-10, the rest). exp(-104) is
    0 in float32, so what decays by more decays by that.
    """
    g = tl.maximum(g, -104.0)
    coarse = tl.floor(g * 1024.0 + 0.5) * 0.0009765625
    return tl.cumsum(coarse, 0), tl.cumsum(g - coarse, 0)


@triton.jit(do_not_specialize=["whole", "count", "wholes", "group", "dims"])
def asked_kernel(
    c,
    b,
    g,
    dt,
    asked,
    factors,
    whole,
    count,
    wholes,
    group,
    b_batch,
    b_row,
    c_batch,
    c_row,
    dims,
    ds: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    PART: tl.constexpr,
):
    """Multiply c and b of one chunk for one head: grid (chunks, heads, sequences).

    asked: of x; factors [.., 3, CHUNK]: of what c reads of S, of an x that goes into S, and of S.
    dims: ds, as a number that no compiler unrolls a loop by.
    """
    chunk, head, n = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    heads, i = tl.num_programs(1), tl.arange(0, CHUNK)
    first, live = tokens_of_chunk(chunk, whole, count, wholes, CHUNK)
    b += n * b_batch + head // group * ds
    c += n * c_batch + head // group * ds
    seen = tl.zeros([CHUNK, CHUNK], tl.float32)
    for d in range(0, dims, PART):
        key = rows_of(b + d, b_row, first, live, ds - d, PART, CHUNK)
        query = rows_of(c + d, c_row, first, live, ds - d, PART, CHUNK)
        seen = tl.dot(query, tl.trans(key), seen, input_precision=PRECISION)
    of_first = (n * count + first) * heads + head
    coarse, fine = summed(tl.load(g + of_first + i * heads, mask=live, other=0.0))
    rate = tl.load(dt + of_first + i * heads, mask=live, other=0.0)
    last = i == CHUNK - 1
    all_coarse = tl.sum(tl.where(last, coarse, 0.0), 0)
    all_fine = tl.sum(tl.where(last, fine, 0.0), 0)
    of_chunk = (n * heads + head) * tl.num_programs(0) + chunk
    row = factors + of_chunk * 3 * CHUNK + i
    tl.store(row, tl.exp(coarse + fine))
    tl.store(row + CHUNK, rate * tl.exp((all_coarse - coarse) + (all_fine - fine)))
    tl.store(row + 2 * CHUNK, tl.exp(all_coarse + all_fine) + tl.zeros([CHUNK], tl.float32))
    before = i[:, None] >= i[None, :]
    passed = (coarse[:, None] - coarse[None, :]) + (fine[:, None] - fine[None, :])
    seen *= tl.exp(tl.where(before, passed, 0.0)) * rate[None, :]
    at = asked + of_chunk * CHUNK * CHUNK + i[:, None] * CHUNK + i[None, :]
    tl.store(at, tl.where(before, seen, 0.0))


@triton.jit(do_not_specialize=["whole", "count", "wholes", "group", "chunks"])
def ssd_chunk_kernel(
    c,
    b,
    x,
    skip,
    asked,
    factors,
    state,
    out,
    after,
    whole,
    count,
    wholes,
    group,
    b_batch,
    b_row,
    c_batch,
    c_row,
    x_batch,
    x_row,
    out_batch,
    out_row,
    chunks,
    ds: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    dh: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Run all chunks through some columns of S: grid (tiles of columns, heads, sequences). S is
    tiles of TILE rows, whose b and c are loaded one after the other.
    """
    head, n = tl.program_id(1), tl.program_id(2).to(tl.int64)
    of_head = n * tl.num_programs(1) + head
    i, r, y = tl.arange(0, CHUNK), tl.arange(0, TILE), tl.arange(0, COLUMNS)
    y += tl.program_id(0) * COLUMNS
    within = y < dh
    x += n * x_batch + head * dh
    out += n * out_batch + head * dh
    b += n * b_batch + head // group * ds
    c += n * c_batch + head // group * ds
    state += of_head * ds * dh
    after += of_head * ds * dh
    own = tl.load(skip + head)
    TILES: tl.constexpr = (ds + TILE - 1) // TILE
    s = ()
    for tile in tl.static_range(TILES):
        row = (r + tile * TILE)[:, None]
        one = tl.load(state + row * dh + y[None, :], mask=(row < ds) & within[None, :], other=0.0)
        s = s + (one,)  # type: ignore[assignment]
    for chunk in range(chunks):
        first, live = tokens_of_chunk(chunk, whole, count, wholes, CHUNK)
        inside = live[:, None] & within[None, :]
        of_chunk = of_head * chunks + chunk
        factor = factors + of_chunk * 3 * CHUNK
        found = tl.zeros([CHUNK, COLUMNS], tl.float32)
        for tile in tl.static_range(TILES):
            d = tile * TILE
            rows = rows_of(c + d, c_row, first, live, ds - d, TILE, CHUNK)
            found = product(rows, s[tile], found, PRECISION)
        found *= tl.load(factor + i)[:, None]
        at = asked + of_chunk * CHUNK * CHUNK + i[:, None] * CHUNK
        for half in tl.static_range(2):
            j = half * (CHUNK // 2) + tl.arange(0, CHUNK // 2)
            held = (first + j < tl.where(chunk < wholes, whole, count))[:, None] & within[None, :]
            part = x + (first + j)[:, None] * x_row + y[None, :]
            few = tl.load(part, mask=held, other=0.0).to(tl.float32)
            found = tl.dot(tl.load(at + j[None, :]), few, found, input_precision=PRECISION)
        token = (first + i)[:, None]
        given = tl.load(x + token * x_row + y[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(out + token * out_row + y[None, :], found + own * given, mask=inside)
        late = given * tl.load(factor + CHUNK + i)[:, None]
        shrink = tl.load(factor + 2 * CHUNK)
        taken = ()
        for tile in tl.static_range(TILES):
            d = tile * TILE
            rows = rows_of(b + d, b_row, first, live, ds - d, TILE, CHUNK)
            one = product(tl.trans(rows), late, s[tile] * shrink, PRECISION)
            taken = taken + (one,)  # type: ignore[assignment]
        s = taken
        if chunk + 1 == wholes:
            # 0 here, which the compiler does not see: see kernels/recurrent/chunk.py
            for tile in tl.static_range(TILES):
                row = (r + (chunk - wholes + 1 + tile * TILE))[:, None]
                there = (row < ds) & within[None, :]
                tl.store(after + (row * dh + y[None, :]), s[tile], mask=there)
