"""Copy K and V between host memory and a device buffer, token by token: the packed load, the write
back to host memory, and the stream of a layer's past.

Host rows live in blocks of 64 tokens anywhere in pinned memory. A table on the device holds the
address of every block, so neither an index nor a block number visits the host. A row is opaque:
4-byte words that nothing here interprets.
"""

from __future__ import annotations

import torch

from kernels.launch.dispatch import choose
from kernels.launch.shapes import power_of_two
from kernels.launch.triton import tl, triton

BLOCK_TOKENS = 64  # tokens of a host block
# 16 KB per program and iteration: 256 threads x four 16-byte loads in flight
TILE_WORDS = 4096
# 256 KB in flight, 54 GB/s x ~2 us round trip is 108 KB: room for a slower link's latency
PROGRAMS = 16


def move_rows_ref(
    table: torch.Tensor,
    offset: int,
    pitch: int,
    buffer: torch.Tensor,
    tokens: torch.Tensor | int,
    slots: torch.Tensor | int,
    count: torch.Tensor | int,
    slabs: list[torch.Tensor],
    to_host: bool = False,
    moved: torch.Tensor | None = None,
) -> None:
    """Reference of `move_rows`, same arguments; finds addresses in `slabs`, copies on the CPU."""
    n = min(int(count), len(tokens)) if isinstance(tokens, torch.Tensor) else int(count)
    token, slot = (
        x[:n].cpu().long() if isinstance(x, torch.Tensor) else torch.arange(x, x + n)
        for x in (tokens, slots)
    )
    if n == 0:
        return
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
    table: torch.Tensor,
    offset: int,
    pitch: int,
    buffer: torch.Tensor,
    tokens: torch.Tensor | int,
    slots: torch.Tensor | int,
    count: torch.Tensor | int,
    slabs: list[torch.Tensor],
    to_host: bool = False,
    moved: torch.Tensor | None = None,
    programs: int | None = None,
    backend: str = "auto",
) -> None:
    """Copy the host row of tokens[i] to buffer[slots[i]], for i < count; with to_host the other way
    round.

    table int64 [blocks]: address of each block of 64 tokens, device-accessible and 16-byte aligned;
    offset: bytes from that address to the row part of the block's first token; pitch: bytes from
    token to token; buffer int32 [S, W] view on the device, last dim contiguous, W words per row, a
    multiple of 4. tokens, slots: int32 [n] on buffer's device, in range, or an int, the first of
    consecutive ones; slots are distinct (with to_host, tokens are). count: int32 [1] on the device,
    or an int. slabs: the uint8 host tensors that the table points into. moved: int64 [1] to which
    the bytes are added, or None. programs: how many run (None: PROGRAMS). Mutates buffer (with
    to_host, the slabs) and moved. Raises ValueError for an unknown backend.
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
    """Move the row tiles p, p + P, ... by program p of P: ROWS rows at a time, WORDS words of each
    per iteration.

    TOKENS, SLOTS, COUNT tell whether the list (or number) is in memory. If not, rows are
    consecutive from first_token, first_slot, `number` of them.
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
        # without this the compiler cannot use 16-byte loads
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
        tl.atomic_add(moved, tl.cast(done, tl.int64) * (W * 4), sem="relaxed")


def move_config(words: int) -> tuple[int, int]:
    """Choose (ROWS, WORDS) of a tile: 16 KB, in whole rows where they are shorter, so that every
    program always has that in flight.
    """
    wide = min(TILE_WORDS, power_of_two(words))
    return max(1, TILE_WORDS // wide), wide


def move_rows_triton(
    table: torch.Tensor,
    offset: int,
    pitch: int,
    buffer: torch.Tensor,
    tokens: torch.Tensor | int,
    slots: torch.Tensor | int,
    count: torch.Tensor | int,
    to_host: bool = False,
    moved: torch.Tensor | None = None,
    programs: int | None = None,
) -> None:
    """`move_rows` by the Triton kernel of this file, same arguments. Bytes: count * 4 W over the
    link, once.
    """
    words = buffer.shape[1]
    rows, wide = move_config(words)
    listed = [isinstance(x, torch.Tensor) for x in (tokens, slots, count)]
    grid = programs or PROGRAMS
    most = next((len(x) for x in (tokens, slots) if isinstance(x, torch.Tensor)), 0) or count
    if isinstance(most, int):
        grid = max(1, min(grid, -(-most // rows)))
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
