"""The gated norm of a gated delta net by the C++ kernel."""

from __future__ import annotations

import ctypes

import torch

from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, check, loaded


class _Call(ctypes.Structure):
    """`Call` of gates.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "z", "weight", "out")),
        *((name, ctypes.c_long) for name in ("z_batch", "z_row")),
        *((name, ctypes.c_int) for name in ("batch", "count", "heads", "size", "wide", "threads")),
        ("eps", ctypes.c_float),
    ]


NORM = Binding("a gated norm", omnikv_sizeof_gated_norm_call=_Call)


def takes_norm(out: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the C++ kernel runs here and takes out [B, S, H, dv] on a CPU: float32 and
    contiguous, z of a float dtype whose heads follow each other, and a weight [dv], contiguous, of
    z's dtype or float32.
    """
    dense = out.dim() == 4 and out.is_contiguous() and weight.is_contiguous()
    follows = z.shape == out.shape and z.stride()[2:] == (z.shape[-1], 1)
    dtypes = out.dtype == torch.float32 and z.dtype in FLOATS
    weighs = weight.dtype in (z.dtype, torch.float32)
    return dense and follows and dtypes and weighs and NORM.usable()


def gated_norm(
    out: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`gated_norm` of kernels/recurrent/gates.py, same arguments."""
    found, size = torch.empty(out.shape, dtype=z.dtype), z.element_size()
    call = _Call(
        *(t.data_ptr() for t in (out, z, weight, found)),
        z.stride(0) * size, z.stride(1) * size,
        *out.shape, weight.dtype != z.dtype, torch.get_num_threads(), eps,
    )  # fmt: skip
    check(loaded().omnikv_gated_norm(ctypes.byref(call), FLOATS[z.dtype]), NORM.name)
    return found
