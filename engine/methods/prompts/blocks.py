"""Blocks of a prompt's queries that read the same rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from engine.bank.row_origins import Span
from kernels.prefill.by_head import Block


def blocks_of(start: int, stop: int, size: int, budget: Callable[[int], int]) -> Iterator[Block]:
    """The blocks of queries start .. stop-1, which begin at multiples of `size`: (first, last,
    first row of the band, rows chosen below that, budget(band) of them). A block whose budget
    covers its past chooses nothing.
    """
    first = start
    while first < stop:
        local = first // size * size
        last, kept = min(stop, local + size), budget(local)
        yield first, last, 0 if kept >= local else local, 0 if kept >= local else kept
        first = last


def spans_of(blocks: Iterable[Block], size: int, described: str) -> list[Span]:
    """The origins of the blocks' rows. described: all that a whole block's rows depend on beside
    the rows before it; a block that is cut chooses for itself.
    """
    spans: list[Span] = []
    for low, high, _, kept in blocks:
        whole = low % size == 0 and high - low == size
        spans.append((high, described if whole or not kept else None))
    return spans
