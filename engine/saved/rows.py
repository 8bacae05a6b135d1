"""A bank's rows as pieces of 256 tokens, in the order of the tokens: the beginning of a session is
the beginning of its file.

A piece is [layers, tokens, 2, Hkv, D] in the bank's dtype, K before V, whatever tier and layout the
bank has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.bank.base import Bank

PIECE = 256  # tokens


def piece_shape(bank: Bank, tokens: int) -> tuple[int, ...]:
    """Shape of a piece of this bank."""
    return bank.num_layers, tokens, 2, bank.kv_heads, bank.width


def spans(tokens: int) -> list[tuple[int, int]]:
    """(first, stop) of every piece of a session of `tokens` tokens; the last may be short."""
    return [(first, min(first + PIECE, tokens)) for first in range(0, tokens, PIECE)]


def read_piece(bank: Bank, first: int, stop: int) -> torch.Tensor:
    """Positions first .. stop-1 of all layers, on the CPU."""
    piece = torch.empty(piece_shape(bank, stop - first), dtype=bank.dtype)
    for layer in range(bank.num_layers):
        for at, k, v in bank.blocks(layer, first, stop, PIECE):
            rows = piece[layer, at - first : at - first + k.shape[2]]
            rows[:, 0].copy_(k[0].transpose(0, 1))
            rows[:, 1].copy_(v[0].transpose(0, 1))
    return piece


def write_piece(bank: Bank, piece: torch.Tensor, first: int, skip: int = 0) -> None:
    """Store a piece at positions first .. of all layers, without its first `skip` tokens. Raises
    OutOfHostMemory.
    """
    for layer in range(bank.num_layers):
        rows = piece[layer, skip:].to(bank.device)
        bank.write_chunk(layer, rows[None, :, 0], rows[None, :, 1], first + skip)


def pieces(bank: Bank, tokens: int) -> Iterator[tuple[int, torch.Tensor]]:
    """(number, piece) of all pieces, in order."""
    for number, (first, stop) in enumerate(spans(tokens)):
        yield number, read_piece(bank, first, stop)
