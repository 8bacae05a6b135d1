"""Rows of a prompt's chunk on their way through a mixture of experts, by the C++ kernels: taken
together for an expert, and added to where they came from.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from kernels.layer.native_step import usable as acts
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded


class _Call(ctypes.Structure):
    """`Call` of expert_rows.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "rows", "shares", "out")),
        *((name, ctypes.c_int) for name in ("count", "inputs", "threads")),
    ]


_BINDING = Binding("rows of experts", omnikv_sizeof_expert_rows_call=_Call)


def moves_rows(x: torch.Tensor) -> bool:
    """Whether the C++ kernels move rows x [T, H] and apply what is between (`act_rows` of
    kernels/layer/native_step.py): floats on a CPU, contiguous.
    """
    ours = x.device.type == "cpu" and x.dtype in FLOATS and x.is_contiguous()
    return ours and not torch.compiler.is_compiling() and _BINDING.usable() and acts()


def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Take rows int64 [n] of x [T, H] together: [n, H]."""
    out = x.new_empty(len(rows), x.shape[1])
    _run("take", x, out, rows)
    return out


def add_rows(
    out: torch.Tensor, part: torch.Tensor, rows: torch.Tensor, shares: torch.Tensor
) -> None:
    """Add part [n, H], times shares float32 [n], to rows int64 [n] of out float32 [T, H]. No row is
    there twice.
    """
    _run("add", part.contiguous(), out, rows, shares)


def _run(
    what: str,
    x: torch.Tensor,
    out: torch.Tensor,
    rows: torch.Tensor,
    shares: torch.Tensor | None = None,
) -> None:
    given = x.data_ptr(), rows.data_ptr(), None if shares is None else shares.data_ptr()
    call = _Call(*given, out.data_ptr(), len(rows), x.shape[1], torch.get_num_threads())
    code = getattr(loaded(), f"omnikv_{what}_expert_rows")(ctypes.byref(call), FLOATS[x.dtype])
    check(code, f"rows of experts of {x.dtype}")


@_BINDING.self_test
def _rows() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    wide, part = (torch.randn(*s, generator=generator) for s in ((9, 70), (3, 70)))
    rows, shares = torch.tensor([7, 0, 2]), torch.rand(3, generator=generator)
    for dtype in FLOATS:
        x, added = wide.to(dtype), part.to(dtype)
        yield f"rows taken in {dtype}", take_rows(x, rows), x[rows].double(), dtype
        found, expected = wide.clone(), wide.double()
        add_rows(found, added, rows, shares)
        expected[rows] += added.double() * shares.double()[:, None]
        yield f"rows added in {dtype}", found, expected, torch.float32
