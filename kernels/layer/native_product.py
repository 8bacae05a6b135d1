"""Products of a few rows with weights of floats by the C++ kernels, with the norm before them and
what follows them: each weight is read once, as it is stored.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kernels.launch.isa import isa
from kernels.layer.norm import normalize_rows_ref
from kernels.native.kinds import FLOATS
from kernels.native.library import Binding, Case, check, loaded

# rows up to which they are faster than torch's operators (docs/PERFORMANCE.md)
ROWS = {"avx2": 16, "avx512": 64, "avx512_bf16": 64, "amx": 64}
ARM_ROWS = 16  # not measured
# bfloat16 with instructions of its own: oneDNN packs a weight for more
PAIRED_ROWS = 16


class _Matrix(ctypes.Structure):
    """`Matrix` of matrix.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int) for name in ("kind", "outputs", "inputs")),
    ]


_BINDING = Binding("products", omnikv_sizeof_matrix=_Matrix)


def reads(weight: torch.Tensor) -> bool:
    """Tell whether the C++ kernels multiply a weight [O, I] as it lies."""
    ours = weight.device.type == "cpu" and weight.dtype in FLOATS and weight.is_contiguous()
    return ours and _BINDING.usable()


class Product:
    """A weight [O, I] of floats, contiguous, with its bias [O] of the same dtype, as the kernels
    take it. most_rows: up to which its product is the fastest, as `most` says or, without it, as
    it is beside torch's.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, most: int | None = None
    ) -> None:
        bias = bias if bias is None else bias.contiguous()
        self._held = weight, bias  # the kernels have their addresses only
        self.dtype, (self.outputs, self.inputs) = weight.dtype, weight.shape
        pointer = None if bias is None else bias.data_ptr()
        kind = FLOATS[weight.dtype]
        self._matrix = _Matrix(weight.data_ptr(), pointer, kind, self.outputs, self.inputs)
        self.address = ctypes.addressof(self._matrix)  # of the struct that kernels take
        paired = weight.dtype == torch.bfloat16 and isa() in ("avx512_bf16", "amx", "neon_bf16")
        usual = PAIRED_ROWS if paired else ROWS.get(isa(), ARM_ROWS)
        self.most_rows = usual if most is None else most

    def __call__(
        self,
        x: torch.Tensor,
        norm: torch.Tensor | None = None,
        eps: float = 0.0,
        residual: torch.Tensor | None = None,
        gated: bool = False,
        wide: bool = False,
        offset: float | None = None,
    ) -> torch.Tensor:
        """Multiply x [..., I], of the weight's dtype: [..., O].

        norm [I]: x is divided by its root mean square and scaled first, as kernels/layer/norm.py
        does; offset: it is added to norm, which multiplies before x is rounded. gated: the first
        half of the outputs goes through SiLU and scales the second (SwiGLU, arXiv 2002.05202), so
        there are O / 2. residual [..., O or O / 2] is added. Sums are float32 and rounded where
        torch's operators round; wide: the result is float32 then. Results do not depend on the
        number of threads.
        """
        x = x.contiguous()
        outputs = self.outputs // 2 if gated else self.outputs
        kept = torch.float32 if wide else self.dtype
        out = torch.empty((*x.shape[:-1], outputs), dtype=kept)
        code = _function()(
            self.address,
            x.data_ptr(),
            None if norm is None else norm.data_ptr(),
            eps,
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
            x.numel() // self.inputs,
            gated,
            wide,
            torch.get_num_threads(),
            offset is not None,
            offset or 0.0,
        )
        check(code, f"a product of {self.dtype}")
        return out


@functools.cache
def _function() -> ctypes._NamedFuncPointer:
    library = loaded()
    function = library.omnikv_product
    pointer, number = ctypes.c_void_p, ctypes.c_int
    function.argtypes = (
        [pointer] * 3 + [ctypes.c_float] + [pointer] * 2 + [number] * 5 + [ctypes.c_float]
    )
    return function


@_BINDING.self_test
def _products() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    sizes = (40, 72), (40,), (3, 72), (72,), (3, 20)
    held = [torch.randn(*size, generator=generator) for size in sizes]
    for dtype in FLOATS:
        weight, bias, x, norm, residual = (t.to(dtype) for t in held)
        expected = F.linear(x.double(), weight.double())
        yield f"a product in {dtype}", Product(weight)(x), expected, dtype
        normed = normalize_rows_ref(x, norm, 1e-5)
        gate, up = F.linear(normed.double(), weight.double(), bias.double()).chunk(2, -1)
        expected = F.silu(gate) * up + residual.double()
        found = Product(weight, bias)(x, norm, 1e-5, residual, gated=True)
        yield f"a gated product in {dtype}", found, expected, dtype
        normed = (F.rms_norm(x.float(), (72,), None, 1e-5) * (norm.float() + 1)).to(dtype)
        expected = F.linear(normed.double(), weight.double())
        found = Product(weight)(x, norm, 1e-5, offset=1.0)
        yield f"a product behind a wide norm in {dtype}", found, expected, dtype
