"""The gated delta rule over a prompt on a GPU: the chunk-wise form (arXiv 2412.06464, section 3.3).

Two launches for SEGMENT chunks of CHUNK tokens. The first takes every chunk and value head by
itself: with p the log decays summed over the chunk, it inverts the unit lower triangular matrix

    1 + A,  A[i, j] = beta[i] exp(p[i] - p[j]) k[i] . k[j]  for j < i

and leaves the inverse times beta, the products of queries and keys under their decays, and what
tokens are multiplied by. The second goes from chunk to chunk, a program for a few columns of S, and
needs products alone:

    d = (1 + A)^-1 beta (v - exp(p) k S),   o = exp(p) q S + (q . k decayed) d

Products are tensor cores', of float32 in two parts of TF32: they lose 2^-22, float32's 2^-24. With
equal keys that nothing forgets, a delta's error is 2.8 times plain torch's in the median, 1.7 of it
since the inverse is a product of its own. q and k of 16 bits are one part, since lengths come after
the products. The inverse is by substitution:
(1 - A)(1 + A^2)(1 + A^4).. takes fewer steps, but equal keys make numbers of 1e17 of it that
cancel.
"""

from __future__ import annotations

import torch

from kernels.launch.shapes import card, power_of_two
from kernels.launch.triton import tl, triton

CHUNK = 64
PIECE = 16  # tokens whose system is solved row by row; pieces of a chunk are by products
PART = 16  # of a head's dimensions are loaded at a time for the chunk's products
SEGMENT = 32  # chunks whose matrices are held at a time: 50 MB for 48 value heads
MOST_DIM = 128  # of a key or a value head
COLUMNS = 16  # of S in one program
REGISTERS = 255  # told for shorter chunks: left alone, ptxas aims at 168 and spills 8 bytes


def delta_chunk(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    keep: int,
    eps: float,
) -> tuple[torch.Tensor, ...]:
    """`gated_delta_chunk` of kernels/recurrent/delta.py, same arguments: (o, S after the first
    N - keep tokens, the other tokens' keys, deltas and decays). eps: beside a squared length.
    """
    batch, count, heads, dk = k.shape
    group, dv, whole = v.shape[2] // heads, v.shape[3], count - keep
    # torch's convolution leaves channel after channel
    q, k, v = (t if t.stride()[2:] == (t.shape[3], 1) else t.contiguous() for t in (q, k, v))
    out = torch.empty(batch, count, heads * group, dv, dtype=torch.float32, device=v.device)
    keys = out.new_empty(batch, heads, keep, dk)
    deltas = out.new_empty(batch, heads * group, keep, dv)
    chunk = chunk_for(k.device)
    step = chunk * SEGMENT
    # the tokens that are kept go with the last whole ones
    for first in range(0, max(whole, 1), step):
        ended = whole - first <= step
        part = slice(first, count if ended else first + step)
        given = q[:, part], k[:, part], v[:, part], g[:, part], beta[:, part], state
        state = _segment(*given, out[:, part], keys, deltas, keep if ended else 0, eps, chunk)
    return out, state, keys, deltas, g[:, whole:].transpose(1, 2).contiguous()


def _segment(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    out: torch.Tensor,
    keys: torch.Tensor,
    deltas: torch.Tensor,
    keep: int,
    eps: float,
    chunk: int,
) -> torch.Tensor:
    """Run some chunks of `chunk` tokens: S after all tokens but `keep`, whose keys and deltas are
    written.
    """
    batch, count, heads, dk = k.shape
    group, dv, whole = v.shape[2] // heads, v.shape[3], count - keep
    wholes = -(-whole // chunk)
    chunks = wholes + -(-keep // chunk)
    g, beta, state = g.contiguous(), beta.contiguous(), state.contiguous()
    after = torch.empty_like(state) if whole else state.clone()
    solved, asked = out.new_empty(2, batch, heads * group, chunks, chunk, chunk)
    factors = out.new_empty(batch, heads * group, chunks, 4, chunk)
    sizes = whole, count, wholes, heads, group, *k.stride()[:2], *q.stride()[:2]
    shape = dict(dk=dk, CHUNK=chunk, PRECISION=precision(), num_stages=1)
    solve_kernel[(chunks, heads * group, batch)](
        q, k, g, beta, solved, asked, factors, keys, *sizes, keep, eps, dk,
        **shape, PART=PART, PIECE=PIECE, num_warps=8,
    )  # fmt: skip
    columns, tile = (max(16, power_of_two(d)) for d in (min(COLUMNS, dv), min(chunk, dk)))
    told = dict(maxnreg=REGISTERS) if chunk < CHUNK else {}
    delta_chunk_kernel[(-(-dv // columns), heads * group, batch)](
        q, k, v, solved, asked, factors, state, out, after, deltas, *sizes,
        *v.stride()[:2], *out.stride()[:2], chunks, keep,
        **shape, TILE=tile, dv=dv, COLUMNS=columns, num_warps=4, **told,
    )  # fmt: skip
    return after


def chunk_for(device: torch.device) -> int:
    """Tokens of a chunk on a card, and rows of S in a tile of `delta_chunk_kernel`: half of CHUNK
    on capability 12, where that kernel takes all 255 registers for 64 and spills 24 bytes.
    """
    found = card(device)
    return CHUNK // 2 if found is not None and found.capability[0] == 12 else CHUNK


def precision() -> str:
    """How float32 is multiplied: AMD's compiler has no three-fold form."""
    return "ieee" if torch.version.hip is not None else "tf32x3"


@triton.jit
def tokens_of_chunk(c, whole, count, wholes, CHUNK: tl.constexpr):
    """(Number of chunk c's first token, which of its tokens are there). The last of `wholes` chunks
    ends at token `whole`, where the kept ones begin.
    """
    first = tl.where(c < wholes, c * CHUNK, whole + (c - wholes) * CHUNK)
    live = first + tl.arange(0, CHUNK) < tl.where(c < wholes, whole, count)
    return first.to(tl.int64), live


@triton.jit
def rows_of(at, row, first, live, dk, DK: tl.constexpr, CHUNK: tl.constexpr):
    """Load a chunk's vectors: [tokens, DK] as they are, 0 where none is. Offsets from its first
    token are a register more for every row, since they stay the same from chunk to chunk.
    """
    n, d = first + tl.arange(0, CHUNK), tl.arange(0, DK)
    inside = live[:, None] & (d < dk)[None, :]
    return tl.load(at + (n[:, None] * row + d[None, :]), mask=inside, other=0.0)


@triton.jit
def length_of(x, eps):
    """What each row of x is divided by, as a factor: float32."""
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 1) + eps)


@triton.jit
def inverted(a, CHUNK: tl.constexpr, PIECE: tl.constexpr, PRECISION: tl.constexpr):
    """Invert 1 + a, a [CHUNK, CHUNK] strictly lower triangular: substitution row by row within
    pieces on the diagonal, all pieces at once, then from piece to piece.
    """
    PIECES: tl.constexpr = CHUNK // PIECE
    i, r = tl.arange(0, CHUNK), tl.arange(0, PIECE)
    piece = tl.arange(0, PIECES)
    diagonal = (piece[:, None] == piece[None, :])[:, None, :, None]
    apart = tl.reshape(a, [PIECES, PIECE, PIECES, PIECE])
    within = tl.sum(tl.where(diagonal, apart, 0.0), 2)  # [PIECES, PIECE, PIECE]
    solved = tl.where((r[:, None] == r[None, :])[None, :, :], 1.0, 0.0)
    solved = tl.broadcast_to(solved, [PIECES, PIECE, PIECE])
    for row in range(1, PIECE):
        here = (r == row)[None, :, None]
        factors = tl.sum(tl.where(here, within, 0.0), 1)  # [PIECES, PIECE]
        found = tl.sum(factors[:, :, None] * solved, 1)
        solved = tl.where(here, solved - found[:, None, :], solved)
    wide = tl.where(diagonal, tl.expand_dims(solved, 2), 0.0)
    wide = tl.reshape(wide, [CHUNK, CHUNK])
    across = tl.where((i // PIECE)[:, None] > (i // PIECE)[None, :], a, 0.0)
    # even and odd columns one after the other: all of them at once spill
    even, odd = tl.split(tl.reshape(across, [CHUNK, CHUNK // 2, 2]))
    even = tl.dot(wide, even, input_precision=PRECISION)
    odd = tl.dot(wide, odd, input_precision=PRECISION)
    across = tl.reshape(tl.join(even, odd), [CHUNK, CHUNK])
    even, odd = tl.split(tl.reshape(wide, [CHUNK, CHUNK // 2, 2]))
    even = passed_on(across, even, PIECES, PRECISION)
    odd = passed_on(across, odd, PIECES, PRECISION)
    return tl.reshape(tl.join(even, odd), [CHUNK, CHUNK])


@triton.jit
def passed_on(across, within, PIECES: tl.constexpr, PRECISION: tl.constexpr):
    """Solve (1 + across) x = within piece by piece: each round makes one piece of x final."""
    found = within
    for _ in range(PIECES - 1):
        found = within - tl.dot(across, found, input_precision=PRECISION)
    return found


@triton.jit
def product(a, b, acc, PRECISION: tl.constexpr):
    """Add a, as it is stored, times b float32 to acc. What 16 bits hold is one part of TF32; b's
    first part is its nearest, so that all but the last bit of the rest fits into the second.
    """
    if PRECISION == "ieee" or a.dtype == tl.float32:
        return tl.dot(a.to(tl.float32), b, acc, input_precision=PRECISION)
    high = ((b.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)
    wide = a.to(tl.float32)
    low = tl.dot(wide, b - high, acc, input_precision="tf32")
    return tl.dot(wide, high, low, input_precision="tf32")


@triton.jit
def in_halves(at, b, acc, PRECISION: tl.constexpr, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """Add the product of the matrix [CHUNK, CHUNK] at `at` and b [CHUNK, COLUMNS] to acc: half of
    the sum after the other, which takes half the registers.
    """
    HALF: tl.constexpr = CHUNK // 2
    place = at + (tl.arange(0, CHUNK)[:, None] * CHUNK + tl.arange(0, HALF)[None, :])
    parts = tl.permute(tl.reshape(b, [2, HALF, COLUMNS]), [1, 2, 0])
    first, second = tl.split(parts)
    acc = tl.dot(tl.load(place), first, acc, input_precision=PRECISION)
    return tl.dot(tl.load(place + HALF), second, acc, input_precision=PRECISION)


@triton.jit(do_not_specialize=["whole", "count", "wholes", "heads", "group", "keep", "dims"])
def solve_kernel(
    q,
    k,
    g,
    beta,
    solved,
    asked,
    factors,
    keys,
    whole,
    count,
    wholes,
    heads,
    group,
    k_batch,
    k_row,
    q_batch,
    q_row,
    keep,
    eps,
    dims,
    dk: tl.constexpr,
    PART: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    PIECE: tl.constexpr,
):
    """Invert the system of one chunk and value head: grid (chunks, value heads, sequences).

    factors [.., 4, CHUNK]: of k S, of q S, of a delta that goes into S, and of S. dims: dk, as a
    number that no compiler unrolls a loop by.
    """
    c, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_head, i = head // group, tl.arange(0, CHUNK)
    first, live = tokens_of_chunk(c, whole, count, wholes, CHUNK)
    k += b * k_batch + key_head * dk
    q += b * q_batch + key_head * dk
    seen, among = tl.zeros([CHUNK, CHUNK], tl.float32), tl.zeros([CHUNK, CHUNK], tl.float32)
    unit, asks = tl.zeros([CHUNK], tl.float32), tl.zeros([CHUNK], tl.float32)
    for d in range(0, dims, PART):
        key = rows_of(k + d, k_row, first, live, dk - d, PART, CHUNK)
        query = rows_of(q + d, q_row, first, live, dk - d, PART, CHUNK)
        seen = tl.dot(query, tl.trans(key), seen, input_precision=PRECISION)
        among = tl.dot(key, tl.trans(key), among, input_precision=PRECISION)
        unit += tl.sum(key.to(tl.float32) * key.to(tl.float32), 1)
        asks += tl.sum(query.to(tl.float32) * query.to(tl.float32), 1)
    unit, asks = tl.rsqrt(unit + eps), tl.rsqrt(asks + eps) * dk**-0.5
    of_first = (b * count + first) * (heads * group) + head
    passed = tl.cumsum(tl.load(g + of_first + i * (heads * group), mask=live, other=0.0), 0)
    total = tl.sum(tl.where(i == CHUNK - 1, passed, 0.0), 0)
    rate = tl.load(beta + of_first + i * (heads * group), mask=live, other=0.0)
    of_chunk = (b * heads * group + head) * tl.num_programs(0) + c
    row = factors + of_chunk * 4 * CHUNK + i
    tl.store(row, unit * tl.exp(passed))
    tl.store(row + CHUNK, asks * tl.exp(passed))
    tl.store(row + 2 * CHUNK, unit * tl.exp(total - passed))
    tl.store(row + 3 * CHUNK, tl.exp(total) + tl.zeros([CHUNK], tl.float32))
    if (c >= wholes) & (head % group == 0):
        kept = keys + ((b * heads + key_head) * keep + first - whole) * dk + i[:, None] * dk
        for d in range(0, dk, PART):
            x = d + tl.arange(0, PART)
            key = rows_of(k + d, k_row, first, live, dk - d, PART, CHUNK).to(tl.float32)
            inside = live[:, None] & (x < dk)[None, :]
            tl.store(kept + x[None, :], key * unit[:, None], mask=inside)
    before = i[:, None] > i[None, :]
    decays = tl.exp(tl.where(before, passed[:, None] - passed[None, :], 0.0)) * unit[None, :]
    place = i[:, None] * CHUNK + i[None, :]
    seen *= decays * asks[:, None]
    tl.store(
        asked + of_chunk * CHUNK * CHUNK + place, tl.where(i[:, None] >= i[None, :], seen, 0.0)
    )
    among *= decays * (unit * rate)[:, None]
    among = tl.where(before, among, 0.0)
    inverse = inverted(among, CHUNK, PIECE, PRECISION)
    # read anew: held through the inversion, it takes registers that sm_80 has not
    rate = tl.load(beta + of_first + i * (heads * group), mask=live, other=0.0)
    tl.store(solved + of_chunk * CHUNK * CHUNK + place, inverse * rate[None, :])


@triton.jit(do_not_specialize=["whole", "count", "wholes", "heads", "group", "chunks", "keep"])
def delta_chunk_kernel(
    q,
    k,
    v,
    solved,
    asked,
    factors,
    state,
    out,
    after,
    deltas,
    whole,
    count,
    wholes,
    heads,
    group,
    k_batch,
    k_row,
    q_batch,
    q_row,
    v_batch,
    v_row,
    out_batch,
    out_row,
    chunks,
    keep,
    dk: tl.constexpr,
    TILE: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    dv: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Run all chunks through some columns of S: grid (tiles of columns, value heads, sequences). S
    is tiles of TILE rows, whose keys and queries are loaded one after the other.
    """
    head, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    key_head, of_head = head // group, b * heads * group + head
    i, x, y = tl.arange(0, CHUNK), tl.arange(0, TILE), tl.arange(0, COLUMNS)
    y += tl.program_id(0) * COLUMNS
    in_v = y < dv
    v += b * v_batch + head * dv
    out += b * out_batch + head * dv
    k += b * k_batch + key_head * dk
    q += b * q_batch + key_head * dk
    state += of_head * dk * dv
    after += of_head * dk * dv
    TILES: tl.constexpr = (dk + TILE - 1) // TILE
    s = ()
    for tile in tl.static_range(TILES):
        row = (x + tile * TILE)[:, None]
        one = tl.load(state + row * dv + y[None, :], mask=(row < dk) & in_v[None, :], other=0.0)
        s = s + (one,)  # type: ignore[assignment]
    for c in range(chunks):
        first, live = tokens_of_chunk(c, whole, count, wholes, CHUNK)
        inside = live[:, None] & in_v[None, :]
        of_chunk = of_head * chunks + c
        factor, system = factors + of_chunk * 4 * CHUNK, of_chunk * CHUNK * CHUNK
        n = (first + i)[:, None]
        read = tl.zeros([CHUNK, COLUMNS], tl.float32)
        found = tl.zeros([CHUNK, COLUMNS], tl.float32)
        for tile in tl.static_range(TILES):
            d = tile * TILE
            keys = rows_of(k + d, k_row, first, live, dk - d, TILE, CHUNK)
            read = product(keys, s[tile], read, PRECISION)
            queries = rows_of(q + d, q_row, first, live, dk - d, TILE, CHUNK)
            found = product(queries, s[tile], found, PRECISION)
        at = v + n * v_row + y[None, :]
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        value -= tl.load(factor + i)[:, None] * read
        delta = in_halves(solved + system, value, tl.zeros_like(value), PRECISION, CHUNK, COLUMNS)
        found *= tl.load(factor + CHUNK + i)[:, None]
        found = in_halves(asked + system, delta, found, PRECISION, CHUNK, COLUMNS)
        at = out + n * out_row + y[None, :]
        tl.store(at, found, mask=inside)
        if c >= wholes:
            at = deltas + (of_head * keep + n - whole) * dv + y[None, :]
            tl.store(at, delta, mask=inside)
        late = delta * tl.load(factor + 2 * CHUNK + i)[:, None]
        shrink = tl.load(factor + 3 * CHUNK)
        taken = ()
        for tile in tl.static_range(TILES):
            d = tile * TILE
            keys = rows_of(k + d, k_row, first, live, dk - d, TILE, CHUNK)
            one = product(tl.trans(keys), late, s[tile] * shrink, PRECISION)
            taken = taken + (one,)  # type: ignore[assignment]
        s = taken
        if c + 1 == wholes:
            # 0 here, which the compiler does not see: places that are kept through the loop take
            # registers that sm_120 has not
            for tile in tl.static_range(TILES):
                row = (x + (c - wholes + 1 + tile * TILE))[:, None]
                there = (row < dk) & in_v[None, :]
                tl.store(after + (row * dv + y[None, :]), s[tile], mask=there)
