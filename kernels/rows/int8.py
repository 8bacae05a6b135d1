"""Rows of K and V in 8 bits: a number per element and one scale per token and head.

A packed row is int8 [D + 8]: D values, the bytes of a float32 scale, four bytes of zero; an element
is value * scale. D is a multiple of 8, and so are rows: a GPU loads 8 bytes at a time, of rows of
D + 4 only 4 (docs/LOG.md, 2026-11-24).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.launch.dispatch import choose
from kernels.native.kinds import Kind
from kernels.native.library import Case
from kernels.rows import native
from kernels.rows.hadamard import transformed_rows

TAIL, ZEROS = 8, 4  # bytes behind the values: a scale, and of those the zeros
ALIGNED = 8  # bytes that a row is a multiple of
TOP = 127  # the largest value; -128 is never used
# below this a scale is subnormal, and some devices flush its reciprocal: such a row is zero
LEAST = 2.0**-126


def width(head_dim: int) -> int:
    """Count the bytes of a head's row."""
    return head_dim + TAIL


def dim(row: int) -> int:
    """Return the head dimension of rows of so many bytes."""
    return row - TAIL


def pack(x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Round x [.., D] of any float dtype to packed rows, int8 [.., D + 8]: the same bits under
    every backend.

    The scale is the largest magnitude / 127, so an element is off by half a scale at most, 1/254 of
    the row's largest. A row whose scale would be below 2^-126 becomes zero; one with an infinity or
    NaN unpacks to values that are not finite. Raises ValueError for an unknown backend.
    """
    out = torch.empty(*x.shape[:-1], width(x.shape[-1]), dtype=torch.int8, device=x.device)
    if choose(backend, x, lambda: native.takes(native.INT8, x)) == "native":
        return native.pack(x, out, Kind.INT8)
    return _packed(x, out)


def _packed(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """`pack` into out, by torch's operators."""
    wide = x.float()
    # a division would be rounded differently by a compiler that multiplies by 1/127
    scale = wide.abs().amax(-1, keepdim=True) * (1.0 / TOP)
    scale = torch.where(scale < LEAST, 0.0, scale)
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
    # half-way cases go up: `store_row` has no other rounding
    out[..., :-TAIL] = (wide * inverse).add_(0.5).floor_()
    out[..., -TAIL:] = tail(scale).view(torch.int8)
    return out


@native.INT8.self_test
def _rounding() -> Iterator[Case]:
    x = native.rows_to_try()
    found, expected = (x.new_empty(40, width(64), dtype=torch.int8) for _ in range(2))
    yield "int8 rows", native.pack(x, found, Kind.INT8), _packed(x, expected), torch.int8


def tail(scale: torch.Tensor) -> torch.Tensor:
    """Return what stands behind a row's values, of scales float32 [.., 1]: float32 [.., 2]."""
    return torch.cat((scale, torch.zeros_like(scale)), -1)


def pack_keys(k: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Round rows of K [.., D] of any float dtype to packed rows, int8 [.., D + 8]: `pack` of the
    transformed rows.
    """
    return pack(transformed_rows(k, backend), backend)


def pack_values(v: torch.Tensor, backend: str = "auto") -> torch.Tensor:
    """Round rows of V [.., D] of any float dtype to packed rows: `pack` of them as they are."""
    return pack(v, backend)


def values(rows: torch.Tensor) -> torch.Tensor:
    """View the values of packed rows: int8 [.., D]."""
    return rows[..., :-TAIL]


def scales(rows: torch.Tensor) -> torch.Tensor:
    """View the scales of packed rows: float32 [..]."""
    return rows[..., -TAIL:].view(torch.float32)[..., 0]


def widen(rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Write the values of packed rows into out [.., D] float32, and return it."""
    return out.copy_(values(rows))
