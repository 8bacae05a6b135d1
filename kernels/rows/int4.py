"""Rows of K in 5 bits and rows of V in 4: odd numbers times one scale per token and head.

A row of K is uint8 [D/2 + D/8 + 4]: a nibble per element, the element's upper bit, the bytes of a
float32 scale. Byte i of the nibbles holds elements i and i + D/2 (in its high half); byte i of the
upper bits holds elements i, i + D/8, i + D/4 and so on, from its lowest bit on. The five bits of an
element are c + 16 of a number 2 c + 1: odd, -31 to 31. The transformed row
(kernels/rows/hadamard.py) is number * scale.

A row of V is uint8 [D/2 + P]: nibbles as above, c + 8 of 2 c + 1: odd, -15 to 15. 32 elements share
a factor of 1 to 8, so that elements are number * factor * scale and need no transform. P bytes:
factors less 1, a nibble each (even groups low), zeros, and at the end the scale's bfloat16; P is a
multiple of 4. number * factor is at most 120, so a decoded row of either kind is one of
kernels/rows/int8.py: values of 8 bits, exact in 16-bit floats, and one scale.

The scale of K, and the factors of V, are those of the few tried whose squared error is least.
Errors are summed as whole numbers, and nothing is multiplied and added in one rounding: a row has
the same bits on every device, whoever writes it. D is a multiple of 32, 256 at most.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from kernels.launch.dispatch import choose
from kernels.native.kinds import Kind
from kernels.native.library import Case
from kernels.rows import native
from kernels.rows.hadamard import transformed_rows

GROUP = 32  # elements of V that share a factor
FACTORS = 8  # the largest factor; 8 * 15 is below 128
TOP_K, TOP_V = 31, 15  # the largest numbers
# scales of K that are tried, in 16ths of the one that reaches the row's largest element
TRIED_K = (16, 15, 14, 13)
TRIED_V = 3  # factors that are tried: the one that reaches the group's largest element, and less
STEPS = 128  # fixed-point steps of a number, in which errors are measured
MOST = 256  # the largest D: a kernel reads a row's factors as one word of 32 bits
LEAST = 2.0**-126  # a subnormal scale is zero, as in kernels/rows/int8.py
# elements that are rounded or decoded at a time: their float32 and int32 stay in a core's cache
AT_ONCE = 2**16


def key_width(head_dim: int) -> int:
    """Count the bytes of a head's row of K."""
    return head_dim // 2 + head_dim // 8 + 4


def value_width(head_dim: int) -> int:
    """Count the bytes of a head's row of V."""
    groups = head_dim // GROUP
    return head_dim // 2 + -(-(-(-groups // 2) + 2) // 4) * 4


@functools.cache
def key_dim(row: int) -> int:
    """Return the head dimension of rows of K of so many bytes."""
    return next(d for d in range(GROUP, MOST + 1, GROUP) if key_width(d) == row)


@functools.cache
def value_dim(row: int) -> int:
    """Return the head dimension of rows of V of so many bytes."""
    return next(d for d in range(GROUP, MOST + 1, GROUP) if value_width(d) == row)


def key_pack(k: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Round rows of K [.., D] of any float dtype: uint8 [.., D/2 + D/8 + 4], the same bits under
    every backend. Raises ValueError for an unknown one.
    """
    out = k.new_empty(*k.shape[:-1], key_width(k.shape[-1]), dtype=torch.uint8)
    if choose(backend, k, lambda: native.takes(native.INT4, k)) == "native":
        return native.pack(transformed_rows(k, backend), out, Kind.INT4_KEYS)
    for rows, held in _pieces(k, out):
        _pack_keys(transformed_rows(rows, backend), held)
    return out


def value_pack(v: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Round rows of V [.., D] of any float dtype: uint8 [.., D/2 + P], as `key_pack`."""
    out = v.new_empty(*v.shape[:-1], value_width(v.shape[-1]), dtype=torch.uint8)
    if choose(backend, v, lambda: native.takes(native.INT4, v)) == "native":
        return native.pack(v, out, Kind.INT4_VALUES)
    for rows, held in _pieces(v, out):
        _pack_values(rows.float(), held)
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
    half, most = x.shape[-1] // 2, x.abs().amax(-1, keepdim=True)
    best = cost = scale = None
    for share in TRIED_K:
        tried = most * (share / 16 / TOP_K)
        tried = torch.where(tried < LEAST, 0.0, tried)
        level, error = _level(x, _inverse(tried), TOP_K)
        found = error.sum(-1, keepdim=True, dtype=torch.int32).float() * (share * share)
        if best is None or cost is None or scale is None:
            best, cost, scale = level, found, tried
            continue
        better = found < cost
        best, scale = torch.where(better, level, best), torch.where(better, tried, scale)
        cost = torch.where(better, found, cost)
    assert best is not None and scale is not None
    code = torch.where(x < 0, 15 - best, best + 16).to(torch.uint8)
    low, high = code & 15, (code >> 4).unflatten(-1, (8, -1))
    shifts = torch.arange(8, dtype=torch.uint8, device=x.device).unsqueeze(-1)
    out[:, :half] = low[:, :half] | (low[:, half:] << 4)
    out[:, half:-4] = (high << shifts).sum(-2, dtype=torch.uint8)
    out[:, -4:] = scale.view(torch.uint8)


def _pack_values(x: torch.Tensor, out: torch.Tensor) -> None:
    """Round rows [n, D] float32 into out [n, bytes]."""
    half, groups = x.shape[-1] // 2, x.shape[-1] // GROUP
    x = x.unflatten(-1, (groups, GROUP))
    most = x.abs().amax(-1, keepdim=True)
    scale = _bfloat16(most.amax(-2, keepdim=True) * (1.0 / (TOP_V * FACTORS)))
    inverse = _inverse(scale)
    reach = _steps(most, inverse)  # of the group's largest element under factor 1
    first = ((reach + (TOP_V * STEPS - 1)) // (TOP_V * STEPS)).clamp_(1, FACTORS)
    best = cost = factor = None
    for less in range(TRIED_V):
        tried = (first - less).clamp_(min=1)
        level, error = _level(x, inverse / tried, TOP_V)
        found = error.sum(-1, keepdim=True, dtype=torch.int32).float() * (tried * tried)
        if best is None or cost is None or factor is None:
            best, cost, factor = level, found, tried
            continue
        better = found < cost
        best, factor = torch.where(better, level, best), torch.where(better, tried, factor)
        cost = torch.where(better, found, cost)
    assert best is not None and factor is not None
    code = torch.where(x < 0, 7 - best, best + 8).to(torch.uint8).flatten(-2)
    held = torch.zeros(len(x), groups + groups % 2, dtype=torch.uint8, device=x.device)
    held[:, :groups] = factor.squeeze(-1) - 1
    out[:, :half] = code[:, :half] | (code[:, half:] << 4)
    out[:, half:-2] = 0
    out[:, half : half + held.shape[1] // 2] = held[:, ::2] | (held[:, 1::2] << 4)
    out[:, -2:] = (scale.flatten().view(torch.int32) >> 16).short().view(-1, 1).view(torch.uint8)


def _level(x: torch.Tensor, inverse: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for elements x and the reciprocal of their scale: int32 the level i of the nearest
    odd number 2 i + 1 in magnitude, and the squared error in steps.
    """
    steps = _steps(x.abs(), inverse)  # at most three times those of the largest number
    level = (steps >> 8).clamp_(max=top // 2)
    return level, (steps - (2 * STEPS * level + STEPS)).square_()


def _steps(x: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return x >= 0 in fixed-point steps: int32, cut off; 0 for what is not finite, whose row has a
    scale that is not finite.
    """
    return (x * inverse * STEPS).nan_to_num_(0.0).to(torch.int32)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, 1.0 / scale, 0.0)


def _bfloat16(x: torch.Tensor) -> torch.Tensor:
    """Round x >= 0 to bfloat16, halves up, as float32; 0 where it would be subnormal."""
    rounded = ((x.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)
    return torch.where(torch.isfinite(x), torch.where(x < LEAST, 0.0, rounded), x)


# ---------------------------------------------------------------- decoding


def key_values(rows: torch.Tensor) -> torch.Tensor:
    """Decode the numbers of rows of K: int8 [.., D], odd."""
    half = key_dim(rows.shape[-1]) // 2
    words = _nibbles(rows[..., :half])
    upper = rows[..., half:-4].view(torch.int32).unsqueeze(-2)
    shifts = torch.arange(8, dtype=torch.int32, device=rows.device).unsqueeze(-1)
    bits = (upper >> shifts).bitwise_and_(0x01010101).bitwise_left_shift_(5)
    return words.bitwise_or_(bits.flatten(-2)).view(torch.int8).sub_(TOP_K)


def key_widen(rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the numbers of rows of K into out [.., D] float32, and return it."""
    return out.copy_(key_values(rows))


def key_scales(rows: torch.Tensor) -> torch.Tensor:
    """View the scales of rows of K: float32 [..]."""
    return rows[..., -4:].view(torch.float32).squeeze(-1)


def value_values(rows: torch.Tensor) -> torch.Tensor:
    """Decode number * factor of rows of V: int8 [.., D]."""
    numbers, factors = _numbers(rows)
    return numbers.mul_(factors).flatten(-2)


def value_widen(rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write number * factor of rows of V into out [.., D] float32, and return it."""
    numbers, factors = _numbers(rows)
    # in float32, where a factor for 32 elements takes two thirds of the time that it does in int8
    out.copy_(numbers.flatten(-2)).unflatten(-1, numbers.shape[-2:]).mul_(factors.float())
    return out


def value_scales(rows: torch.Tensor) -> torch.Tensor:
    """Copy the scales of rows of V: float32 [..]."""
    return rows[..., -2:].view(torch.bfloat16).squeeze(-1).float()


def _numbers(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Decode rows of V: (odd numbers int8 [.., groups, GROUP], factors int8 [.., groups, 1])."""
    half = value_dim(rows.shape[-1]) // 2
    groups = 2 * half // GROUP
    packed = rows[..., half : half + -(-groups // 2)]
    factors = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)[..., :groups]
    numbers = _nibbles(rows[..., :half]).view(torch.int8).sub_(TOP_V)
    return numbers.unflatten(-1, (groups, GROUP)), factors.char().add_(1).unsqueeze(-1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return twice the nibbles of packed uint8 [.., D/2], a byte each: int32 [.., D/4]."""
    words = packed.view(torch.int32)
    count = words.shape[-1]
    out = words.new_empty(*words.shape[:-1], 2 * count)
    torch.bitwise_and(words << 1, 0x1E1E1E1E, out=out[..., :count])
    torch.bitwise_and(words >> 3, 0x1E1E1E1E, out=out[..., count:])
    return out
