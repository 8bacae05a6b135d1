"""A bank's rows as pieces of 256 tokens, in the order of the tokens: the beginning of a session is
the beginning of its file.

A piece is [layers, tokens, 2, Hkv, D] in the bank's dtype, K before V, whatever tier and layout the
bank has; of the layers that hold all tokens. What sliding-window layers hold is kept apart. Where
packed rows of K and of V differ in length it is [layers, tokens, K of every head and then V]. Zeros
behind a packed row are left out, and put back when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from engine.bank.base import Bank
from engine.bank.window_ring import WindowRing
from engine.saved.ahead import DEPTH, ahead
from kernels.rows.forms import ZEROS, with_zeros

PIECE = 256  # tokens


def piece_shape(bank: Bank, tokens: int) -> tuple[int, ...]:
    """Shape of a piece of this bank."""
    one, other = _widths(bank)
    row = (2, bank.kv_heads, one) if one == other else (bank.kv_heads * (one + other),)
    return len(_whole(bank)), tokens, *row


def _widths(bank: Bank) -> tuple[int, int]:
    """Elements of a head's row of K and of V in a piece."""
    one, other = bank.widths
    if not other:
        return one, 0
    zeros = ZEROS.get(bank.dtype, 0)
    return one - zeros, other - zeros


def _sides(bank: Bank, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """View rows of one layer of a piece as K and V [tokens, Hkv, D]."""
    rows = rows.view(len(rows), -1)
    if not bank.widths[1]:  # V is K
        k = rows.unflatten(1, (bank.kv_heads, -1))
        return k, k
    at = bank.kv_heads * _widths(bank)[0]
    return rows[:, :at].unflatten(1, (bank.kv_heads, -1)), rows[:, at:].unflatten(
        1, (bank.kv_heads, -1)
    )


def _whole(bank: Bank) -> list[int]:
    """The layers that hold rows of all tokens, ascending."""
    return list(bank.keeping)


def _rings(bank: Bank) -> dict[int, WindowRing]:
    """{sliding-window layer that writes rows: its ring}."""
    found = {}
    for layer, rows in enumerate(bank.row_layers):
        ring = bank.window_ring(layer) if rows == layer else None
        if ring is not None:
            found[layer] = ring
    return found


def _ring_widths(bank: Bank, ring: WindowRing) -> tuple[int, int]:
    """As `_widths`, of a ring."""
    zeros = ZEROS.get(bank.dtype, 0)
    return ring.k.shape[-1] - zeros, ring.v.shape[-1] - zeros


def windows(bank: Bank, stop: int) -> dict[int, tuple[int, torch.Tensor]]:
    """{sliding-window layer: (first position held, its K and V up to stop-1 [2, B, Hkv, n, D])}, on
    the CPU; [B, Hkv, n, K and then V] where packed rows differ in length.
    """
    found = {}
    for layer, ring in _rings(bank).items():
        kept = _ring_widths(bank, ring)
        views = [view[..., :width] for view, width in zip(ring.views(ring.low, stop), kept)]
        same = kept[0] == kept[1]
        found[layer] = ring.low, (torch.stack(views) if same else torch.cat(views, -1)).cpu()
    return found


def write_windows(bank: Bank, held: dict[int, tuple[int, torch.Tensor]], stop: int) -> None:
    """Store the rows that `windows` returned. Raises ValueError for rows of another bank."""
    rings = _rings(bank)
    if set(held) != set(rings):
        raise ValueError("windows")
    for layer, ring in rings.items():
        low, rows = held[layer]
        one, other = _ring_widths(bank, ring)
        shape: tuple[int, ...] = bank.batch, ring.k.shape[1], stop - low, one + other
        if one == other:
            shape = 2, *shape[:-1], one
        enough = type(low) is int and 0 <= low <= max(0, stop - ring.window)
        if not enough or tuple(rows.shape) != shape or rows.dtype != bank.dtype:
            raise ValueError("windows")
        rows = rows.to(ring.k.device)
        k, v = map(with_zeros, rows if one == other else rows.split((one, other), -1))
        ring.load(k, v, low, stop)


def spans(tokens: int) -> list[tuple[int, int]]:
    """(first, stop) of every piece of a session of `tokens` tokens; the last may be short."""
    return [(first, min(first + PIECE, tokens)) for first in range(0, tokens, PIECE)]


def read_piece(bank: Bank, first: int, stop: int) -> torch.Tensor:
    """Positions first .. stop-1 of all layers, on the CPU."""
    piece = torch.empty(piece_shape(bank, stop - first), dtype=bank.dtype)
    for number, layer in enumerate(_whole(bank)):
        for at, k, v in bank.blocks(layer, first, stop, PIECE):
            rows = _sides(bank, piece[number, at - first : at - first + k.shape[2]])
            for held, side in zip(rows, (k, v)):
                held.copy_(side[0, ..., : held.shape[-1]].transpose(0, 1))
    return piece


def write_piece(bank: Bank, piece: torch.Tensor, first: int, skip: int = 0) -> None:
    """Store a piece at positions first .. of all layers, without its first `skip` tokens. Raises
    OutOfHostMemory.
    """
    for number, layer in enumerate(_whole(bank)):
        k, v = _sides(bank, piece[number, skip:].to(bank.device))
        bank.write_chunk(layer, with_zeros(k[None]), with_zeros(v[None]), first + skip)


def pieces(bank: Bank, tokens: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(number, piece) of all pieces, in order."""
    for number, (first, stop) in enumerate(spans(tokens)):
        yield number, read_piece(bank, first, stop)


@contextmanager
def read_ahead(
    bank: Bank, wanted: Sequence[tuple[int, int]], read: Callable[[int, torch.Tensor], None]
) -> Iterator[Iterator[torch.Tensor]]:
    """Give the pieces of the `wanted` spans, in order, each until the next one is asked for.
    read(number, piece) fills them, a few ahead, on threads; what it raises comes in their place.
    """
    depth = min(DEPTH, len(wanted))
    whole = math.prod(piece_shape(bank, PIECE))
    buffers = [torch.empty(whole, dtype=bank.dtype) for _ in range(depth)]

    def filled(number: int) -> torch.Tensor:
        first, stop = wanted[number]
        shape = piece_shape(bank, stop - first)
        piece = buffers[number % depth][: math.prod(shape)].view(shape)
        read(number, piece)
        return piece

    with ahead(filled, len(wanted), depth) as found:
        yield found
