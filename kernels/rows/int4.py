"""Rows of K in 6 bits and rows of V in 4: whole numbers times one scale per token and head.

Both hold the transformed row (kernels/rows/hadamard.py). The scale has a sign: the row's largest
element becomes -32, or -8, where the numbers reach one further than on the other side. An element
is number * scale.

A row of K is uint8 [3 D/4 + 4]: three planes of D/4 bytes, and the bytes of a float32 scale. The
lower six bits of byte i of the planes are number + 32 of elements 2 i, 2 i + D/2 and 2 i + 1. The
upper two bits of the three are those of element 2 i + 1 + D/2, the highest first, and each of them
is flipped in its upper bit: read as numbers of two bits with a sign they say number - 10.

A row of V is uint8 [D/2 + 4]: byte i holds number + 8 of element i, and of i + D/2 in its high
half, and then comes the scale. So tensor cores' operands of K take a mask of whole registers
(kernels/rows/int4_tiles.py), and a decoded row of either kind is one of kernels/rows/int8.py.

The scale of V is the one of four whose squared error is least; 64 numbers gain nothing from that.
Errors are summed as whole numbers, and nothing is multiplied and added in one rounding: a row has
the same bits on every device, whoever writes it. D is a multiple of 32, 256 at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kernels.launch.dispatch import choose
from kernels.native.kinds import Kind
from kernels.native.library import Case
from kernels.rows import native
from kernels.rows.hadamard import transformed_rows

MULTIPLE = 32  # that D is of
MOST = 256  # the largest D: products of 8-bit digits stay below 2^31
LOW_K, LOW_V = 32, 8  # the least numbers are -32 and -8
# scales that are tried, in 16ths of that under which the row's largest element is the least number
TRIED_K, TRIED_V = (16,), (16, 15, 14, 13)
STEPS = 128  # fixed-point steps of a number, in which errors are measured
LEAST = 2.0**-126  # a subnormal scale is zero, as in kernels/rows/int8.py
FLIPPED = 0b101010  # of the number that three planes share
# elements that are rounded at a time: their float32 and int32 stay in a core's cache
AT_ONCE = 2**16


def key_width(head_dim: int) -> int:
    """Count the bytes of a head's row of K."""
    return head_dim // 4 * 3 + 4


def value_width(head_dim: int) -> int:
    """Count the bytes of a head's row of V."""
    return head_dim // 2 + 4


def key_dim(row: int) -> int:
    """Return the head dimension of rows of K of so many bytes."""
    return (row - 4) // 3 * 4


def value_dim(row: int) -> int:
    """Return the head dimension of rows of V of so many bytes."""
    return (row - 4) * 2


def key_pack(k: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Round rows of K [.., D] of any float dtype: uint8 [.., 3 D/4 + 4], the same bits under every
    backend. Raises ValueError for an unknown one.
    """
    out = k.new_empty(*k.shape[:-1], key_width(k.shape[-1]), dtype=torch.uint8)
    return _pack(k, out, Kind.INT4_KEYS, _pack_keys, backend)


def value_pack(v: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Round rows of V [.., D] of any float dtype: uint8 [.., D/2 + 4], as `key_pack`."""
    out = v.new_empty(*v.shape[:-1], value_width(v.shape[-1]), dtype=torch.uint8)
    return _pack(v, out, Kind.INT4_VALUES, _pack_values, backend)


def _pack(
    x: torch.Tensor,
    out: torch.Tensor,
    kind: Kind,
    by: Callable[[torch.Tensor, torch.Tensor], None],
    backend: str,
) -> torch.Tensor:
    if choose(backend, x, lambda: native.takes(native.INT4, x)) == "native":
        return native.pack(transformed_rows(x, backend), out, kind)
    for rows, held in _pieces(x, out):
        by(transformed_rows(rows, backend), held)
    return out


@native.INT4.self_test
def _rounding() -> Iterator[Case]:
    x = native.rows_to_try()
    for kind, by, bytes_ in (
        (Kind.INT4_KEYS, _pack_keys, key_width(64)),
        (Kind.INT4_VALUES, _pack_values, value_width(64)),
    ):
        found, expected = (x.new_empty(40, bytes_, dtype=torch.uint8) for _ in range(2))
        by(x, expected)
        yield "int4 rows", native.pack(x, found, kind), expected, torch.uint8


def _pieces(x: torch.Tensor, out: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rows, held = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
    size = max(1, AT_ONCE // x.shape[-1]) if x.device.type == "cpu" else len(rows)
    return list(zip(rows.split(size), held.split(size))) if len(rows) else []


def _pack_keys(x: torch.Tensor, out: torch.Tensor) -> None:
    """Round transformed rows [n, D] float32 into out [n, bytes]."""
    number, scale = _rounded(x, LOW_K, TRIED_K)
    low, high = (number + LOW_K).to(torch.uint8).chunk(2, -1)
    fourth = high[:, 1::2] ^ FLIPPED
    planes = low[:, ::2], high[:, ::2], low[:, 1::2]
    held = [plane | (fourth >> shift << 6) for plane, shift in zip(planes, (4, 2, 0))]
    torch.cat((*held, scale.view(torch.uint8)), -1, out=out)


def _pack_values(x: torch.Tensor, out: torch.Tensor) -> None:
    """Round transformed rows [n, D] float32 into out [n, bytes]."""
    number, scale = _rounded(x, LOW_V, TRIED_V)
    low, high = (number + LOW_V).to(torch.uint8).chunk(2, -1)
    torch.cat((low | (high << 4), scale.view(torch.uint8)), -1, out=out)


def _rounded(
    x: torch.Tensor, low: int, shares: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows [n, D] float32: (numbers int32 [n, D] from -low to low - 1, scales [n, 1])."""
    most = x.abs().amax(-1, keepdim=True)
    sign = torch.where(x.amax(-1, keepdim=True) > -x.amin(-1, keepdim=True), -1.0, 1.0)
    best = cost = scale = None
    for share in shares:
        tried = most * (share / 16 / low)
        tried = torch.where(tried < LEAST, 0.0, tried) * sign
        number, found = _numbers(x, _inverse(tried), low)
        found = found.float() * (share * share)
        if best is None or cost is None or scale is None:
            best, cost, scale = number, found, tried
            continue
        better = found < cost
        best, scale = torch.where(better, number, best), torch.where(better, tried, scale)
        cost = torch.where(better, found, cost)
    assert best is not None and scale is not None
    return best, scale


def _numbers(x: torch.Tensor, inverse: torch.Tensor, low: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for rows x and the reciprocals of their scales the nearest numbers, and the squared
    errors in steps [n, 1], int32. What is not finite is 0: its row has a scale that is not finite.
    """
    steps = (x * inverse * STEPS).nan_to_num_(0.0, 0.0, 0.0).to(torch.int32)
    number = ((steps + STEPS // 2) >> 7).clamp_(-low, low - 1)
    error = (steps - STEPS * number).square_()
    return number, error.sum(-1, keepdim=True, dtype=torch.int32)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale.abs() > 0, 1.0 / scale, 0.0)


# ---------------------------------------------------------------- decoding


def key_values(rows: torch.Tensor) -> torch.Tensor:
    """Decode the numbers of rows of K: int8 [.., D]."""
    quarter = key_dim(rows.shape[-1]) // 4
    one, two, three = rows[..., : 3 * quarter].split(quarter, -1)
    four = ((one >> 6 << 4) | (two >> 6 << 2) | (three >> 6)) ^ FLIPPED
    low, high = torch.stack((one, three), -1), torch.stack((two, four), -1)
    found = torch.cat((low.flatten(-2), high.flatten(-2)), -1)
    return found.bitwise_and_(63).view(torch.int8).sub_(LOW_K)


def key_widen(rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the numbers of rows of K into out [.., D] float32, and return it."""
    return out.copy_(key_values(rows))


def key_scales(rows: torch.Tensor) -> torch.Tensor:
    """View the scales of rows of K: float32 [..]."""
    return rows[..., -4:].view(torch.float32).squeeze(-1)


def value_values(rows: torch.Tensor) -> torch.Tensor:
    """Decode the numbers of rows of V: int8 [.., D]."""
    packed = rows[..., :-4]
    return torch.cat((packed & 15, packed >> 4), -1).view(torch.int8).sub_(LOW_V)


def value_widen(rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the numbers of rows of V into out [.., D] float32, and return it."""
    return out.copy_(value_values(rows))


def value_scales(rows: torch.Tensor) -> torch.Tensor:
    """View the scales of rows of V: float32 [..]."""
    return key_scales(rows)
