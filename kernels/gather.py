"""Rows between host memory and a device buffer, by token: the packed load, its way home, and the
stream of a layer's past.

Host rows live in blocks of 64 tokens anywhere in pinned memory; a table on the device holds the
address of every block, so that neither an index nor a block number visits the host. Rows are
opaque: 4-byte words, nothing of them is interpreted.
"""

import torch

from kernels._triton import tl, triton
from kernels.dispatch import choose
from kernels.split import power_of_two

BLOCK_TOKENS = 64  # tokens of a host block
# 16 KB per program and iteration: 256 threads x four 16-byte loads in flight
TILE_WORDS = 4096
# 256 KB in flight, 54 GB/s x ~2 us round trip is 108 KB: room for a slower link's latency
PROGRAMS = 16


def move_rows_ref(
    table, offset, pitch, buffer, tokens, slots, count, slabs, to_host=False, moved=None
):
    """Reference of `move_rows`, same arguments; finds each address in `slabs` and copies on the
    CPU.
    """
    n = min(int(count), len(tokens)) if torch.is_tensor(tokens) else int(count)
    where = [
        (x[:n].cpu().long() if torch.is_tensor(x) else torch.arange(x, x + n))
        for x in (tokens, slots)
    ]
    if n == 0:
        return
    token, slot = where
    width = buffer.shape[1] * 4
    address = table.cpu()[token // BLOCK_TOKENS] + offset + (token % BLOCK_TOKENS) * pitch
    for slab in slabs:
        base = slab.data_ptr()
        mine = ((address >= base) & (address < base + slab.numel())).nonzero()[:, 0]
        if not len(mine):
            continue
        # in units of 16 bytes, which every row is a multiple of
        at = (address[mine] - base) // 16
        units = slab[: slab.numel() // 16 * 16].view(torch.int32).view(-1, 4)
        index = (at[:, None] + torch.arange(width // 16)).flatten()
        rows = slot[mine].to(buffer.device)
        if to_host:
            units[index] = buffer[rows].cpu().view(-1, 4)
        else:
            buffer[rows] = units.index_select(0, index).view(len(mine), -1).to(buffer.device)
    if moved is not None:
        moved += n * width


def move_rows(
    table,
    offset,
    pitch,
    buffer,
    tokens,
    slots,
    count,
    slabs,
    to_host=False,
    moved=None,
    programs=None,
    backend="auto",
):
    """buffer[slots[i]] = the host row of tokens[i], for i < count; with to_host the other way
    round.

    table int64 [blocks]: address of each block of 64 tokens (device-accessible, 16-byte aligned);
    offset, pitch: ints, bytes from there to the row part of its first token, and from token to
    token; buffer int32 [S, W] view on the device, last dim contiguous, W words per row, a multiple
    of 4. tokens, slots: int32 [n] on buffer's device, or an int for consecutive ones; count: int32
    [1] on the device or an int. slabs: the uint8 host tensors the table points into. moved int64
    [1] or None: bytes are added. programs: how many run (None: PROGRAMS). Distinct slots (or
    tokens, to_host); indices must be in range. Mutates the target.
    """
    if choose(backend, buffer) == "triton":
        move_rows_triton(
            table, offset, pitch, buffer, tokens, slots, count, to_host, moved, programs
        )
    else:
        move_rows_ref(table, offset, pitch, buffer, tokens, slots, count, slabs, to_host, moved)


@triton.jit
def move_kernel(
    buffer,
    table,
    tokens,
    slots,
    count,
    moved,
    first_token,
    first_slot,
    number,
    offset,
    pitch,
    stride,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
    TOKENS: tl.constexpr,
    SLOTS: tl.constexpr,
    COUNT: tl.constexpr,
    MOVED: tl.constexpr,
    TO_HOST: tl.constexpr,
):
    """Program p of P moves the row tiles p, p + P, ...: ROWS rows at a time, WORDS words of each
    per iteration.

    TOKENS, SLOTS, COUNT: whether the list (or number) is in memory; else consecutive from
    first_token, first_slot, `number` long.
    """
    n = number
    if COUNT:
        n = tl.load(count)
    pid = tl.program_id(0)
    programs = tl.num_programs(0)
    r = tl.arange(0, ROWS)
    w = tl.arange(0, WORDS)
    done = 0
    for start in range(pid * ROWS, n, programs * ROWS):
        i = start + r
        live = i < n
        token = first_token + i
        slot = (first_slot + i).to(tl.int64)
        if TOKENS:
            token = tl.load(tokens + i, mask=live, other=0)
        if SLOTS:
            slot = tl.load(slots + i, mask=live, other=0).to(tl.int64)
        block = tl.load(table + token // 64, mask=live, other=0)
        address = block + offset + (token % 64).to(tl.int64) * pitch
        # what 16-byte loads hang on
        host = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
        device = buffer + tl.multiple_of(slot * stride, 4)
        for first in range(0, W, WORDS):
            c = first + w
            inside = live[:, None] & (c < W)[None, :]
            if TO_HOST:
                tl.store(
                    host[:, None] + c[None, :],
                    tl.load(device[:, None] + c[None, :], mask=inside, other=0),
                    mask=inside,
                )
            else:
                tl.store(
                    device[:, None] + c[None, :],
                    tl.load(host[:, None] + c[None, :], mask=inside, other=0),
                    mask=inside,
                )
        done += tl.sum(live.to(tl.int32), 0)
    if MOVED:
        tl.atomic_add(moved, done.to(tl.int64) * (W * 4), sem="relaxed")


def move_config(words):
    """(ROWS, WORDS) of a tile: 16 KB, whole rows where they are shorter, so that every program
    always has that in flight.
    """
    wide = min(TILE_WORDS, power_of_two(words))
    return max(1, TILE_WORDS // wide), wide


def move_rows_triton(
    table, offset, pitch, buffer, tokens, slots, count, to_host=False, moved=None, programs=None
):
    """`move_rows` by the Triton kernel of this file, same arguments. Bytes: count * 4 W over the
    link, once.
    """
    words = buffer.shape[1]
    rows, wide = move_config(words)
    listed = [torch.is_tensor(x) for x in (tokens, slots, count)]
    most = (
        next((len(x) for x, yes in ((tokens, listed[0]), (slots, listed[1])) if yes), None) or count
    )
    grid = (
        max(1, min(programs or PROGRAMS, -(-most // rows)))
        if not torch.is_tensor(most)
        else programs or PROGRAMS
    )
    # an argument that the compiled variant never touches
    dummy = table
    move_kernel[(grid,)](
        buffer,
        table,
        *(x if yes else dummy for x, yes in zip((tokens, slots, count), listed)),
        dummy if moved is None else moved,
        0 if listed[0] else tokens,
        0 if listed[1] else slots,
        0 if listed[2] else count,
        offset,
        pitch,
        buffer.stride(0),
        W=words,
        ROWS=rows,
        WORDS=wide,
        TOKENS=listed[0],
        SLOTS=listed[1],
        COUNT=listed[2],
        MOVED=moved is not None,
        TO_HOST=to_host,
        num_warps=8,
    )
