"""Rows of a prompt's chunk on their way through a mixture of experts, by the C++ kernels: taken
together for an expert, activated, and added to where they came from.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from kernels.experts.native_experts import ACTIVATIONS
from kernels.experts.open import SILU, Activation, activated
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded


class _Call(ctypes.Structure):
    """`Call` of expert_rows.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "rows", "shares", "out")),
        *((name, ctypes.c_int) for name in ("count", "inputs", "threads", "kind")),
        *((name, ctypes.c_float) for name in ("limit", "alpha")),
    ]


_BINDING = Binding("rows of experts", omnikv_sizeof_expert_rows_call=_Call)


def moves_rows(x: torch.Tensor) -> bool:
    """Whether the C++ kernels move rows x [T, H]: floats on a CPU, contiguous."""
    ours = x.device.type == "cpu" and x.dtype in FLOATS and x.is_contiguous()
    return ours and not torch.compiler.is_compiling() and _BINDING.usable()


def take_rows(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Take rows int64 [n] of x [T, H] together: [n, H]."""
    out = x.new_empty(len(rows), x.shape[1])
    _run("take", x, out, len(rows), rows)
    return out


def add_rows(
    out: torch.Tensor, part: torch.Tensor, rows: torch.Tensor, shares: torch.Tensor
) -> None:
    """Add part [n, H], times shares float32 [n], to rows int64 [n] of out float32 [T, H]. No row is
    there twice.
    """
    _run("add", part.contiguous(), out, len(rows), rows, shares)


def act_rows(made: torch.Tensor, activation: Activation = SILU) -> torch.Tensor:
    """`activated` (kernels/experts/open.py) for made [n, 2 W] or [n, W]: [n, W]. Rounded to the
    dtype after the gate's activation and at the end.
    """
    out = made.new_empty(len(made), made.shape[1] // activation.made)
    _run("act", made.contiguous(), out, len(made), activation=activation)
    return out


def _run(
    what: str,
    x: torch.Tensor,
    out: torch.Tensor,
    count: int,
    rows: torch.Tensor | None = None,
    shares: torch.Tensor | None = None,
    activation: Activation = SILU,
) -> None:
    kind, limit, alpha = activation
    beside = (None if t is None else t.data_ptr() for t in (rows, shares))
    call = _Call(
        x.data_ptr(), *beside, out.data_ptr(), count, x.shape[1], torch.get_num_threads(),
        ACTIVATIONS.index(kind), limit, alpha,
    )  # fmt: skip
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
        for activation in (SILU, Activation("clamped", 0.5, 1.7)):
            expected = activated(x.double(), activation)
            yield f"{activation.kind} of rows in {dtype}", act_rows(x, activation), expected, dtype
