"""Products of many rows with weights of floats as they are stored, by the C++ kernel, which widens
a strip of the weight at a time to float32.

MKL multiplies float32 by code of AVX2 on CPUs that are not Intel's, and oneDNN's products of
float32 err four times as much as MKL's: they sum all columns in one go. 16 bits that a CPU emulates
are multiplied so too, without a copy of the weight in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kernels.launch.isa import SETS, isa, multiplies
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded

TILE = 6  # rows of a tile, as in many.cpp
LEAST = 17  # rows from which strips are faster than what else there is (docs/LOG.md)


class _Call(ctypes.Structure):
    """`Call` of many.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out", "scratch")),
        *((name, ctypes.c_int) for name in ("rows", "outputs", "inputs", "threads")),
    ]


_BINDING = Binding("products of many rows", omnikv_sizeof_many_rows_call=_Call)


def strips_multiply(weight: torch.Tensor) -> bool:
    """Tell whether the C++ kernel multiplies many rows by a weight [O, I] as it lies, on a CPU, and
    faster than torch: float32, or 16 bits that the CPU emulates, contiguous, on an x86 that is not
    Intel's.
    """
    ours = weight.device.type == "cpu" and weight.dtype in FLOATS and weight.is_contiguous()
    emulated = weight.dtype == torch.float32 or not multiplies(weight.dtype)
    if not (ours and emulated and isa() in SETS and weight.numel() and _BINDING.usable()):
        return False
    return not loaded().omnikv_is_intel()


class StripProduct:
    """A weight [O, I] of floats, contiguous, with its bias [O] of the same dtype or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias if bias is None else bias.contiguous()

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x [..., I] has rows enough, and torch.compile does not look."""
        alike = x.dtype == self.weight.dtype and x.numel() >= LEAST * self.weight.shape[1]
        return alike and not torch.compiler.is_compiling()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., I] of the weight's dtype: [..., O] of that dtype, new. Sums are float32
        and rounded once, behind the bias. Results do not depend on the number of threads, nor a
        row's on the other rows.
        """
        x = x.contiguous()
        outputs, inputs = self.weight.shape
        rows = x.numel() // inputs
        out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype)
        scratch = torch.empty(-(-rows // TILE) * TILE * inputs)
        bias = None if self.bias is None else self.bias.data_ptr()
        call = _Call(
            x.data_ptr(), self.weight.data_ptr(), bias, out.data_ptr(), scratch.data_ptr(),
            rows, outputs, inputs, torch.get_num_threads(),
        )  # fmt: skip
        code = loaded().omnikv_many_rows(ctypes.byref(call), FLOATS[x.dtype])
        check(code, f"a product of many rows of {x.dtype}")
        return out


@_BINDING.self_test
def _products() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    for rows, outputs, inputs in ((20, 70, 290), (7, 5, 33)):
        sizes = (outputs, inputs), (outputs,), (rows, inputs)
        held = [torch.randn(*size, generator=generator) for size in sizes]
        for dtype in FLOATS:
            weight, bias, x = (t.to(dtype) for t in held)
            expected = F.linear(x.double(), weight.double(), bias.double())
            found = StripProduct(weight, bias)(x)
            yield f"a product of {rows} rows in strips in {dtype}", found, expected, dtype
