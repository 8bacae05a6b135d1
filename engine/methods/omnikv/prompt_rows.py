"""What OmniKV-prefill reads of a sparse layer in host memory: the rows that the blocks of a chunk
chose, each once, and the newest ones.

The same functions say what a chunk will read before it is read: the memory plan counts the bytes of
the link with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from engine.bank.base import PromptRows
from engine.bank.row_origins import RowOrigins, Span
from engine.methods.omnikv.block_sparse import FROM
from engine.methods.omnikv.settings import Settings
from engine.plan.layers import LayerPlan, tail_start

# a block of a chunk: first and last position, and the first of the band that is always seen (None:
# the block is read densely)
Block = tuple[int, int, int | None]


def prompt_blocks(method: Settings, k: int, start: int, stop: int, total: float) -> Iterator[Block]:
    """The blocks of a chunk at positions start .. stop-1 of a prompt that ends at `total`. k: rows
    of one selection.
    """
    first = start
    while first < stop:
        last = min(stop, (first // method.prefill_block + 1) * method.prefill_block)
        local = tail_start(first, method.tail)
        dense = last > total - method.prefill_dense_end or local <= k
        yield first, last, None if dense else local
        first = last


def runs_of(blocks: Sequence[Block], start: int) -> list[tuple[int, list[Block]]]:
    """The blocks from `start` on, in runs that are all sparse or all dense: (index row of the first
    sparse block, blocks).
    """
    runs: list[tuple[int, list[Block]]] = []
    row = 0
    for first, last, local in blocks:
        if last > start:  # the last layer sees the chunk's last query only
            if not runs or (runs[-1][1][-1][2] is None) != (local is None):
                runs.append((row, []))
            runs[-1][1].append((max(first, start), last, local))
        row += local is not None
    return runs


class Cut(NamedTuple):
    """Sparse blocks whose rows are brought over together: `base` is the first position of which
    everything is there, and up to `named` rows below it are chosen ones.
    """

    row: int
    blocks: list[Block]
    base: int
    named: int


def cuts_of(row: int, run: list[Block], k: int, begin: int, room: int) -> Iterator[Cut]:
    """Cut a run of sparse blocks so that the rows of each cut fit into `room` rows.

    row: index row of the first block. begin: the chunk's first position, from which on rows are on
    the device.
    """
    while run:
        base = min(run[0][2] or 0, begin)
        count = 1
        while count < len(run) and min((count + 1) * k, base) + run[count][1] - base <= room:
            count += 1
        yield Cut(row, run[:count], base, min(count * k, base))
        row, run = row + count, run[count:]


def rows_over_link(
    method: Settings,
    k: int,
    begin: int,
    stop: int,
    total: float,
    room: int,
    start: int | None = None,
) -> int:
    """The most rows that the chunk at positions begin .. stop-1 reads of one offloaded layer in
    host memory. start: the first query that attends (None: all of them).
    """
    rows = 0
    blocks = list(prompt_blocks(method, k, begin, stop, total))
    for row, run in runs_of(blocks, begin if start is None else start):
        if run[0][2] is None:
            rows += begin
        else:
            rows += sum(cut.named + begin - cut.base for cut in cuts_of(row, run, k, begin, room))
    return rows


def named_rows(
    index: torch.Tensor, cut: Cut, begin: int, scratch: torch.Tensor
) -> tuple[PromptRows, torch.Tensor]:
    """What a cut reads, and its selections as rows of that.

    index [N, k] int32: distinct positions per block; scratch: float32 [2 or more, more than
    cut.base], overwritten. Returns the rows, and [1, N, k] int32: a chosen position below cut.base
    became its place in the list, a later one its place behind the list. Nothing visits the host.
    """
    flat, base, most = index.flatten().long(), cut.base, cut.named
    # a column more than `base` for what is there anyway
    mark, place = (scratch[i, : base + 1].view(torch.int32) for i in range(2))
    below = flat.clamp(max=base)
    mark.zero_()
    mark.index_fill_(0, below, 1)
    torch.cumsum(mark, 0, dtype=torch.int32, out=place)
    named = flat < base
    at = torch.where(named, place[below] - 1, most + (flat - base))
    tokens = torch.zeros(most + 1, dtype=torch.int32, device=index.device)
    tokens[torch.where(named, at, most).long()] = flat.int()
    count = place[base - 1 : base].clone() if base else torch.zeros_like(tokens)
    rows = PromptRows(tokens[:most], count, base, begin, cut.blocks[-1][1])
    return rows, at.int().view(1, *index.shape)


def read_by_blocks(
    method: Settings, plan: LayerPlan, spans: list[Span], first: int, total: float
) -> list[Span]:
    """Return the spans of a chunk that begins at `first`, cut into the blocks that choose rows of
    their own (prefill_ratio, block-sparse layers). total: the prompt's length.
    """
    stop, origin = spans[-1]
    if origin is None:
        return spans
    if method.prefill_ratio and plan.sparse_layers:
        spans, size = [], method.prefill_block
        for low, high, local in prompt_blocks(
            method, method.prefill_ratio * size, first, stop, total
        ):
            # a block that the chunk or the prompt cuts chooses for itself
            whole = low % size == 0 and high - low == size
            spans.append((high, origin if local is None else _described(method) if whole else None))
    if method.dense_layers != "dense" and stop > FROM:
        # estimates of blocks: not worth a name
        spans = [*RowOrigins(spans).of(0, FROM), (stop, None)]
    return spans


def _described(method: Settings) -> str:
    """All that a whole block's rows depend on beside the rows before it."""
    names = "filter_layers", "wait_layers", "tail", "prefill_ratio", "prefill_block"
    said = [f"{name}={getattr(method, name)}" for name in (*names, "prefill_stride")]
    return f"{method.name} prompt: {', '.join(said)}"
