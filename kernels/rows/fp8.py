"""Rows of K and V in 8-bit floats: four bits of precision each, and one scale per token and head.

A packed row is float8_e4m3fn [D + 8]: D values and the tail of kernels/rows/int8.py; an element is
value * scale, and the largest magnitude is 448. As many bytes as those rows, whose values are off
by half a step of 127 wherever they lie; these are off by 1/16 of themselves at most. A CPU has no
instruction that widens them. Their bits are those of a float16 of a 256th of the value.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.launch.dispatch import choose
from kernels.native.kinds import Kind
from kernels.native.library import Case
from kernels.rows import native
from kernels.rows.hadamard import transformed_rows
from kernels.rows.int8 import LEAST, TAIL, dim, scales, tail, width

__all__ = ["dim", "scales", "width"]
TOP = 448  # the largest finite value
KIND = torch.float8_e4m3fn


def pack(x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Round x [.., D] of any float dtype to packed rows, float8_e4m3fn [.., D + 8]: the same bits
    under every backend.

    The scale is the largest magnitude / 448. A row whose scale would be below 2^-126 becomes zero;
    one with an infinity or NaN unpacks to values that are not finite. Raises ValueError for an
    unknown backend.
    """
    out = torch.empty(*x.shape[:-1], width(x.shape[-1]), dtype=KIND, device=x.device)
    if choose(backend, x, lambda: native.takes(native.FP8, x)) == "native":
        return native.pack(x, out, Kind.FP8)
    return _packed(x, out)


def _packed(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`pack` into out, by torch's operators."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True) * (1.0 / TOP)
    scale = torch.where(scale < LEAST, 0.0, scale)
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    out[..., :-TAIL] = (wide * inverse).to(KIND)
    out[..., -TAIL:] = tail(scale).view(KIND)
    return out


@native.FP8.self_test
def _rounding() -> Iterator[Case]:
    x = native.rows_to_try()
    found, expected = (x.new_empty(40, width(64), dtype=KIND) for _ in range(2))
    yield "fp8 rows", native.pack(x, found, Kind.FP8), _packed(x, expected), KIND


def pack_keys(k: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Round rows of K [.., D] to packed rows: `pack` of the transformed rows."""
    return pack(transformed_rows(k, backend), backend)


def values(rows: torch.Tensor) -> torch.Tensor:
    """Convert the values of packed rows to float32 [.., D]."""
    if rows.device.type != "cpu":
        return rows[..., :-TAIL].float()
    return widen(rows, torch.empty(*rows.shape[:-1], dim(rows.shape[-1])))


def widen(rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the values of packed rows into out [.., D] float32, and return it."""
    # torch converts one value at a time: 7 times as long as this, which widens NaN to 480
    bits = rows[..., :-TAIL].view(torch.int8).short()
    bits = (bits << 7).bitwise_and_(0x3F80).bitwise_or_(bits.bitwise_and_(-0x8000))
    return out.copy_(bits.view(torch.float16)).mul_(256.0)
