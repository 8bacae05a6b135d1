"""A counter-based source of chance: the same numbers give the same bits on any device, in any
order, so that a step that is run again draws again what it drew.
"""

from __future__ import annotations

from typing import TypeVar

import torch

TOP_BITS = 29  # of a random number that make a score: all float32 bits below 2.0 and normal
NORMAL = 1 << TOP_BITS
MASK = (1 << 31) - 1  # what is left of an int64 after an arithmetic shift by 33


def mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of int64, in place: every output bit depends on every input bit (the finalizer of
    MurmurHash3).
    """
    high = torch.empty_like(x)

    def fold() -> torch.Tensor:
        """x ^= its upper 31 bits."""
        torch.bitwise_right_shift(x, 33, out=high)
        return x.bitwise_xor_(high.bitwise_and_(MASK))

    # 0xff51afd7ed558ccd and 0xc4ceb9fe1a85ec53 as int64
    for factor in (-49064778989728563, -4265267296055464877):
        fold().mul_(factor)
    return fold()


Stream = TypeVar("Stream", int, torch.Tensor)


def offset(seed: int, stream: Stream) -> Stream:
    """Where a seed's numbers of one stream begin, or of int64 streams; they are 2^32 long."""
    return ((seed * 0x27D4EB2F % (1 << 30) + stream * 0x165667B1) % (1 << 30)) << 32


def numbers(seed: int, count: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """A random odd number of every position, int32 [count]: what `draw` makes scores of. Odd, since
    `mix` leaves 0 as it is: times any factor, position 0 of seed 0 would be the lowest of all.
    """
    return mix(torch.arange(count, device=device) + offset(seed, 0)).bitwise_or_(1).to(torch.int32)


def factors(visible: torch.Tensor, seed: int, stream: Stream) -> torch.Tensor:
    """Odd numbers of a step, one for each sequence and stream, int32. visible: rows that the step
    sees, of every sequence; stream: an int, or int64 that broadcasts against visible.
    """
    return mix(visible.long() + offset(seed, 1 + stream)).bitwise_or_(1).to(torch.int32)


def draw(random: torch.Tensor, factor: torch.Tensor, scores: torch.Tensor) -> None:
    """Fill scores [R, n] float32 by chance, uniform and independent from token to token and nearly
    so from row to row: random [n] int32 times the odd factor [R] of a row, modulo 2^32.

    Of two equal scores (one pair in half a billion) a top-k takes the lower position. In place.
    """
    bits = scores.view(torch.int32)
    torch.mul(random, factor[:, None], out=bits)
    # the high bits: a product's low ones depend on low ones only
    bits.bitwise_right_shift_(32 - TOP_BITS).bitwise_and_(NORMAL - 1).add_(NORMAL)
