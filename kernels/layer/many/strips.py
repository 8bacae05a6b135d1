"""Products of many rows with weights of floats as they are stored, by the C++ kernel, with what
follows them: a strip of the weight at a time is laid across and meets all rows.

Its threads are the team of all other kernels (kernels/native/team.cpp), which takes strips as it
goes: torch's products have threads of their own, which sleep between them and have to share the
cores with the team's. On one thread bfloat16 with products of its own is as fast as oneDNN's.
MKL multiplies float32 by code of AVX2 on CPUs that are not Intel's, and oneDNN's products of
float32 err four times as much as MKL's: they sum all columns in one go. 16 bits that a CPU emulates
are widened a strip at a time, without a copy of the weight in float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kernels.launch.isa import SETS, isa, multiplies
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded

LEAST = 17  # rows from which strips are faster than what else there is (docs/LOG.md)


class _Call(ctypes.Structure):
    """`Call` of many.cpp."""

    _fields_ = [
        *(
            (name, ctypes.c_void_p)
            for name in ("x", "weight", "bias", "residual", "out", "scratch")
        ),
        *((name, ctypes.c_int) for name in ("rows", "outputs", "inputs", "threads", "gated")),
    ]


_BINDING = Binding("products of many rows", omnikv_sizeof_many_rows_call=_Call)


def strips_multiply(weight: torch.Tensor) -> bool:
    """Tell whether the C++ kernel multiplies many rows by a weight [O, I] as it lies, on a CPU, and
    not slower than torch: contiguous, of float32 or 16 bits, on an x86 that is not Intel's. Tiles
    of AMX, torch's too, are faster in bfloat16.
    """
    ours = weight.device.type == "cpu" and weight.dtype in FLOATS and weight.is_contiguous()
    paired = weight.dtype == torch.bfloat16 and isa() == "avx512_bf16"
    emulated = weight.dtype == torch.float32 or not multiplies(weight.dtype)
    fast = isa() in SETS and (paired or emulated)
    if not (ours and fast and weight.numel() and _BINDING.usable()):
        return False
    return not loaded().omnikv_is_intel()


class StripProduct:
    """A weight [O, I] of floats, contiguous, with its bias [O] of the same dtype or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias if bias is None else bias.contiguous()
        kind = FLOATS[weight.dtype]
        self._cells = loaded().omnikv_many_rows_cells(kind, weight.shape[1])

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x [..., I] has rows enough, and torch.compile does not look."""
        alike = x.dtype == self.weight.dtype and x.numel() >= LEAST * self.weight.shape[1]
        return alike and not torch.compiler.is_compiling()

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, gated: bool = False
    ) -> torch.Tensor:
        """Multiply x [..., I] of the weight's dtype: [..., O] of that dtype, new.

        gated: the first half of the outputs goes through SiLU and scales the second (SwiGLU, arXiv
        2002.05202), so there are O / 2. residual [..., O or O / 2], of that dtype, is added. Sums
        are float32 and rounded where torch's operators round. Results do not depend on the number
        of threads, nor a row's on the other rows. Where rows have to become cells first (columns of
        bfloat16 that are no pairs, 16 bits that are emulated) it takes float32 [rows, I] beside.
        """
        x = x.contiguous()
        outputs, inputs = self.weight.shape
        rows = x.numel() // inputs
        out = torch.empty((*x.shape[:-1], outputs // 2 if gated else outputs), dtype=x.dtype)
        scratch = torch.empty(rows * self._cells)
        residual = residual if residual is None else residual.contiguous()
        beside = (None if t is None else t.data_ptr() for t in (self.bias, residual))
        call = _Call(
            x.data_ptr(), self.weight.data_ptr(), *beside, out.data_ptr(), scratch.data_ptr(),
            rows, outputs, inputs, torch.get_num_threads(), gated,
        )  # fmt: skip
        code = loaded().omnikv_many_rows(ctypes.byref(call), FLOATS[x.dtype])
        check(code, f"a product of many rows of {x.dtype}")
        return out


@_BINDING.self_test
def _products() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    for rows, outputs, inputs in ((20, 70, 290), (7, 6, 33)):
        sizes = (outputs, inputs), (outputs,), (rows, inputs), (rows, outputs // 2)
        held = [torch.randn(*size, generator=generator) for size in sizes]
        for dtype in FLOATS:
            weight, bias, x, residual = (t.to(dtype) for t in held)
            expected = F.linear(x.double(), weight.double(), bias.double())
            product = StripProduct(weight, bias)
            yield f"a product of {rows} rows in strips in {dtype}", product(x), expected, dtype
            gate, up = expected.chunk(2, -1)
            expected = F.silu(gate) * up + residual.double()
            found = product(x, residual, gated=True)
            yield f"a gated product of {rows} rows in {dtype}", found, expected, dtype
