"""Block-sparse prefill attention of dense layers: a block of queries attends, per head, to the key
blocks that carry its attention mass.

The mass is estimated from few products: a softmax over one number per S x S tile, the product of
the mean query of S rows and the mean K of S rows, summed over the tiles of a block pair (as in
SpargeAttn, thu-ml/SpargeAttn, without its quantised part; docs/PREFILL.md says how near it comes).
Each head chooses its own blocks: the union over a group's heads would keep nearly everything.
Blocks lie at absolute multiples of BLOCK, so cutting a prompt into other chunks of whole blocks
does not change a result.
"""

from __future__ import annotations

import torch

from kernels.launch.dispatch import choose
from kernels.launch.isa import multiplies
from kernels.launch.shapes import Config, power_of_two, softmax_step
from kernels.launch.softmax import PLAIN
from kernels.launch.triton import tl, triton
from kernels.prefill.dense import attend_chunk, attend_rows
from kernels.prefill.merge import merge
from kernels.rows.forms import is_packed, key_floats, stored_queries, unpack_keys, value_sums
from kernels.rows.int4_tiles import columns
from kernels.rows.tiles import load_keys, load_values, scaled_logits

BLOCK = 128
ROWS = 1024  # tiles of K that are float32 at a time: 4 MB of 8 rows of 128
MASS_FLOATS = 1 << 23  # logits of tiles at a time: 32 MB, twice while their softmax is taken


def block_mass(
    q: torch.Tensor, k: torch.Tensor, first: int, stride: int, scale: float
) -> torch.Tensor:
    """Estimate the share of attention mass of every (head, query block, key block).

    q [B, C, H, D] at positions first .. first+C-1, first and C multiples of BLOCK; k
    [B, Hkv, >= first+C, D] view; stride: S, a divisor of BLOCK; scale: of the logits, 1/sqrt(D).
    Returns float32 [B, H, C / BLOCK, (first + C) / BLOCK]: a row sums to one, key blocks after the
    query block are zero. Memory: `kept_bytes`.
    """
    batch, chunk, heads, dim = q.shape
    kv_heads, stop = k.shape[1], first + chunk
    group, per = heads // kv_heads, BLOCK // stride
    column = torch.arange(stop // stride, device=q.device)
    mass = torch.empty(batch, heads, chunk // BLOCK, stop // BLOCK, device=q.device)
    at_once = blocks_at_once(group * per * (stop // stride))
    for b in range(batch):
        for h in range(kv_heads):
            own = slice(h * group, (h + 1) * group)
            queries = q[b, :, own].transpose(0, 1).reshape(group, chunk // stride, stride, dim)
            rows_k = unpack_keys(k[b, h, :stop], q.dtype).reshape(stop // stride, stride, dim)
            # means in float32 are 1.3 times as fast as in 16 bits, and rounded once
            queries = queries.mean(2, dtype=torch.float32).to(q.dtype)
            rows_k = rows_k.mean(1, dtype=torch.float32).to(q.dtype)
            for low in range(0, chunk // BLOCK, at_once):
                high = min(chunk // BLOCK, low + at_once)
                logits = _product(queries[:, low * per : high * per], rows_k)
                newest = column[first // stride :][low * per : high * per].unsqueeze(1)
                logits.mul_(scale).masked_fill_(column > newest, float("-inf"))
                tiles = torch.softmax(logits, -1).view(group, high - low, per, stop // BLOCK, per)
                del logits
                mass[b, own, low:high] = tiles.sum((2, 4)).div_(per)
                del tiles
            del queries, rows_k
    return mass


def blocks_at_once(tiles: int) -> int:
    """Count the query blocks whose logits exist at a time, 1 at least; tiles: logits of a block."""
    return max(1, MASS_FLOATS // tiles)


def _product(queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Multiply [G, N, W] by rows [M, W] to float32 [G, N, M]; on a CPU that would emulate the dtype
    in float32, ROWS rows at a time.
    """
    if queries.device.type != "cpu" or multiplies(queries.dtype):
        return (queries @ rows.t()).float()
    wide, out = queries.float(), queries.new_empty(*queries.shape[:2], len(rows), dtype=torch.float)
    for start in range(0, len(rows), ROWS):
        part = rows[start : start + ROWS]
        out[..., start : start + len(part)] = wide @ part.float().t()
    return out


def choose_blocks(mass: torch.Tensor, first: int, threshold: float) -> torch.Tensor:
    """Keep the fewest key blocks of each row whose mass reaches `threshold`, and always block 0,
    the query's own block and the one before it.

    mass as `block_mass` returns it; first: position of the first query. Returns bool of the same
    shape.
    """
    ordered, order = mass.sort(-1, descending=True)
    wanted = ordered.cumsum(-1).sub_(ordered) < threshold
    del ordered
    keep = torch.zeros_like(wanted).scatter_(-1, order, wanted)
    column = torch.arange(mass.shape[-1], device=mass.device)
    own = first // BLOCK + torch.arange(mass.shape[-2], device=mass.device).unsqueeze(1)
    keep |= (column == 0) | (column == own - 1) | (column == own)
    return keep.logical_and_(column <= own)


def kept_bytes(
    heads: int, kv_heads: int, dim: int, itemsize: int, chunk: int, stop: int, stride: int
) -> int:
    """Return the most bytes that `block_mass` and `choose_blocks` hold at a time for a chunk of so
    many tokens that ends at `stop`, and `block_lists` after them. (A sort's own workspace and what
    a CPU converts for a dtype that it emulates are not counted.)
    """
    group, per = heads // kv_heads, BLOCK // stride
    pairs = heads * (chunk // BLOCK) * (stop // BLOCK)
    blocks = min(chunk // BLOCK, blocks_at_once(group * per * (stop // stride)))
    tiles = blocks * per * (stop // stride)
    rows = stop // stride * dim * itemsize
    copied = group * chunk * dim * itemsize
    made = copied // stride + rows + max(copied, 8 * group * tiles)
    # mass, its order (values and int64), the sum before each, what is wanted
    return max(4 * pairs + 8 * (stop // stride) + made, (4 + 12 + 4 + 1) * pairs)


def attend_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor,
    first: int,
    scale: float,
    backend: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend causally to the kept key blocks.

    q [B, C, H, D] at positions first .. first+C-1, first and C multiples of BLOCK; k, v
    [B, Hkv, >= first+C, D] views of any strides, last dim contiguous, floats or packed; keep
    [B, H, C / BLOCK, (first + C) / BLOCK] bool; every query block's own key block counts as kept.
    Returns (out [B, C, H, D] in q.dtype, lse [B, C, H] float32). Raises ValueError for an unknown
    backend.
    """
    if choose(backend, q) == "triton":
        return attend_blocks_triton(q, k, v, keep, first, scale)
    return attend_blocks_ref(q, k, v, keep, first, scale, backend)


def attend_blocks_ref(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor,
    first: int,
    scale: float,
    backend: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_blocks` on every other backend, same arguments.

    Gathers the kept past blocks per head, attends causally to the own block, and merges the two by
    log-sum-exp. backend: of the two parts.
    """
    batch, chunk, heads, dim = q.shape
    group = heads // k.shape[1]
    out, lse = torch.empty_like(q), torch.empty(batch, chunk, heads, device=q.device)
    for b in range(batch):
        rows_k, rows_v = (
            t[b, :, : first + chunk].reshape(t.shape[1], -1, BLOCK, t.shape[3]) for t in (k, v)
        )
        lists = [
            [rows[: (first // BLOCK + n)].nonzero().squeeze(1) for n, rows in enumerate(head)]
            for head in keep[b]
        ]
        for n in range(chunk // BLOCK):
            part = slice(n * BLOCK, (n + 1) * BLOCK)
            chunk_rows = k[b : b + 1], v[b : b + 1], first + n * BLOCK
            own = attend_chunk(q[b : b + 1, part], *chunk_rows, scale, PLAIN, backend)
            past_out, past_lse = torch.zeros_like(own[0]), torch.full_like(own[1], float("-inf"))
            for head in range(heads):
                if not len(lists[head][n]):
                    continue
                past_k, past_v = (
                    t[head // group].index_select(0, lists[head][n]).view(1, 1, -1, t.shape[-1])
                    for t in (rows_k, rows_v)
                )
                one = slice(head, head + 1)
                past_out[:, :, one], past_lse[:, :, one] = attend_rows(
                    q[b : b + 1, part, one], past_k, past_v, scale, False, PLAIN, backend
                )
            out[b : b + 1, part], lse[b : b + 1, part] = merge([own, (past_out, past_lse)], q.dtype)
    return out, lse


def block_lists(keep: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """List the kept past blocks in ascending order, as the kernel reads them; no sync, no sort.

    keep [B, H, N, L] -> (lists [B, H, N, L] int32, counts [B, H, N] int32). A query block's own and
    later blocks are left out. Entries from the count on are undefined.
    """
    column = torch.arange(keep.shape[-1], device=keep.device)
    own = first // BLOCK + torch.arange(keep.shape[-2], device=keep.device).unsqueeze(1)
    past = keep & (column < own)
    counts, place = past.sum(-1, dtype=torch.int32), past.cumsum(-1).sub_(1)
    # everything else goes to the extra last entry, which is cut off
    place.masked_fill_(past.logical_not_(), keep.shape[-1])
    lists = torch.zeros(*keep.shape[:-1], keep.shape[-1] + 1, dtype=torch.int32, device=keep.device)
    lists.scatter_(-1, place, column.int().expand_as(place))
    del place
    return lists[..., :-1].contiguous(), counts


@triton.jit
def blocks_kernel(
    q,
    k,
    v,
    lists,
    counts,
    out,
    lse,
    scale,
    longest,
    heads,
    sqb,
    sqc,
    sqh,
    skb,
    skh,
    skt,
    svb,
    svh,
    svt,
    sob,
    soc,
    soh,
    first,
    G: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Attend with M queries of one block under one head.

    Grid (heads * BLOCK // M, blocks, B); the last blocks come first, as their lists are longest.
    Reads the kept past blocks, TILE rows at a time, then the own block up to the tile's last query.
    lists [B, H, blocks, longest]. The rows of a tile are known one iteration ahead, so that the
    loads of K and V are pipelined.
    """
    head = tl.program_id(0) // (BLOCK // M)
    tile = tl.program_id(0) % (BLOCK // M)
    blocks = tl.num_programs(1)
    n = blocks - 1 - tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    r = tl.arange(0, M)
    d = columns(k, D, DP)
    t = tl.arange(0, TILE)
    c = n * BLOCK + tile * M + r
    at = b * sqb + c.to(tl.int64)[:, None] * sqc + head * sqh + d[None, :]
    rows = tl.load(q + at, mask=(d < D)[None, :], other=0.0)
    k += b * skb + (head // G).to(tl.int64) * skh
    v += b * svb + (head // G).to(tl.int64) * svh
    entry = (b * heads + head) * blocks + n
    tiles = tl.load(counts + entry) * (BLOCK // TILE)
    lists += entry * longest
    m = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, DP], tl.float32)
    # One loop for past and own rows: with two, both loops' products define one accumulator, and
    # ptxas serialises every wgmma (warning C7515; 24 of 24 waited on sm_90, now 2 of 12).
    own = first + n * BLOCK
    every = tiles + (tile + 1) * M // TILE
    row = tl.where(tiles > 0, tl.load(lists, mask=tiles > 0, other=0) * BLOCK, own) + t
    last = own + tile * M + r
    whole = tl.full([TILE], True, tl.int1)
    for i in range(0, every):
        place = row.to(tl.int64)
        k_tile = load_keys(k, place, skt, d, whole, rows, D)
        values = load_values(v, place, svt, d, whole, rows, D, True)
        scores = tl.dot(rows, tl.trans(k_tile), input_precision="ieee") * scale
        scores = scaled_logits(scores, k, place, skt, whole, D)
        scores = tl.where(row[None, :] <= last[:, None], scores, float("-inf"))
        m, total, acc = softmax_step(scores, values, m, total, acc)
        after = i + 1
        block = tl.load(lists + after // (BLOCK // TILE), mask=after < tiles, other=0)
        past = block * BLOCK + after % (BLOCK // TILE) * TILE
        row = tl.where(after < tiles, past, own + (after - tiles) * TILE) + t
    at = b * sob + c.to(tl.int64)[:, None] * soc + head * soh + d[None, :]
    tl.store(out + at, (acc / total[:, None]).to(out.dtype.element_ty), mask=(d < D)[None, :])
    tl.store(lse + (b * (blocks * BLOCK) + c) * heads + head, m + tl.log(total))


def blocks_config(head_dim: int, itemsize: int, rows: torch.dtype | None = None) -> Config:
    """Choose a whole block of 128 queries and 64 rows in 16 bits at head_dim 128, 32 packed rows.
    itemsize: bytes of an element of q; rows: the dtype of K and V where they are packed.

    That is 64 accumulator registers under 8 warps, and K and V twice in flight in 64 KB beside
    32 KB of queries, within the 99 KB of sm_89. Wider rows make smaller tiles. Rows of at most 128
    bytes are three times in flight (head_dim 64 with two spilled 8 bytes on sm_100). Rows of 6 and
    4 bits are unpacked by every warp: 128 queries spill 64 bytes on sm_80, and 64 of them do not.
    """
    dim = max(16, power_of_two(head_dim))
    most = 64 if rows == torch.uint8 and dim > 64 else BLOCK
    queries = max(16, min(most, 32768 // (dim * itemsize)))
    tile = max(16, min(64, 16384 // (dim * itemsize)) // (2 if rows is not None else 1))
    return Config(
        tile,
        queries,
        dim,
        warps=8 if queries * dim >= 8192 else 4,
        stages=3 if dim * itemsize <= 128 else 2,
        queries=queries,
    )


def attend_blocks_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keep: torch.Tensor,
    first: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attend_blocks` by the Triton kernel of this file, same arguments: one launch that reads
    every kept K and V in place.

    Heads of a group that keep the same block find it in L2 (their programs are neighbours).
    Operations: 4 * 128 * 128 * D per kept block and head; own blocks count whole.
    """
    batch, chunk, heads, head_dim = q.shape
    config = blocks_config(head_dim, q.element_size(), k.dtype if is_packed(k) else None)
    q = stored_queries(q, k)
    lists, counts = block_lists(keep, first)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, chunk, heads, dtype=torch.float32, device=q.device)
    blocks_kernel[(heads * (BLOCK // config.rows), chunk // BLOCK, batch)](
        q,
        k,
        v,
        lists,
        counts,
        out,
        lse,
        scale,
        lists.shape[-1],
        heads,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        first,
        G=heads // k.shape[1],
        M=config.rows,
        D=head_dim,
        DP=config.dim,
        TILE=config.block,
        BLOCK=BLOCK,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return value_sums(out, v), lse


def exact_mass(q: torch.Tensor, k: torch.Tensor, first: int, scale: float) -> torch.Tensor:
    """Compute the true mass that `block_mass` estimates, in the same shape, for reports and tests.

    Holds all weights of one head.
    """
    batch, chunk, heads, _ = q.shape
    group, stop = heads // k.shape[1], first + chunk
    mass = torch.empty(batch, heads, chunk // BLOCK, stop // BLOCK, device=q.device)
    later = torch.arange(stop, device=q.device) > torch.arange(
        first, stop, device=q.device
    ).unsqueeze(1)
    for b in range(batch):
        for head in range(heads):
            logits = (q[b, :, head].float() @ key_floats(k[b, head // group, :stop]).t()) * scale
            weights = torch.softmax(logits.masked_fill_(later, float("-inf")), -1)
            mass[b, head] = (
                weights.view(chunk // BLOCK, BLOCK, stop // BLOCK, BLOCK).sum((1, 3)) / BLOCK
            )
    return mass
