"""Products of many rows of bfloat16 in tiles of AMX, by the C++ kernel, with a weight as it is
stored.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from kernels.native.amx import TileBinding
from kernels.native.library import Case, check, loaded

ROWS = 32  # from which a weight is worth turning into tiles, which costs what 100 rows multiply


class _Call(ctypes.Structure):
    """`Call` of tiled_product.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int) for name in ("rows", "outputs", "inputs", "threads")),
    ]


_BINDING = TileBinding("products in tiles", omnikv_sizeof_tiled_product=_Call)


def tiles_multiply(weight: torch.Tensor) -> bool:
    """Tell whether tiles of AMX run here (kernels/native/amx.py) and multiply many rows by a weight
    [O, I] as it lies: bfloat16, contiguous.
    """
    ours = weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    return ours and weight.is_contiguous() and _BINDING.usable()


class TiledProduct:
    """A weight [O, I] of bfloat16, contiguous, with its bias [O] of bfloat16 or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias if bias is None else bias.contiguous()

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x [..., I] has rows enough, and torch.compile does not look."""
        many = x.numel() >= ROWS * self.weight.shape[1] > 0
        return many and x.dtype == torch.bfloat16 and not torch.compiler.is_compiling()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., I] of bfloat16: [..., O] of bfloat16, new. Sums are float32 and rounded
        once, behind the bias. Results do not depend on the number of threads. Raises MemoryError
        where tiles of x find no room.
        """
        x = x.contiguous()
        outputs, inputs = self.weight.shape
        out = torch.empty(*x.shape[:-1], outputs, dtype=torch.bfloat16)
        bias = None if self.bias is None else self.bias.data_ptr()
        call = _Call(
            x.data_ptr(), self.weight.data_ptr(), bias, out.data_ptr(),
            x.numel() // inputs, outputs, inputs, torch.get_num_threads(),
        )  # fmt: skip
        check(loaded().omnikv_tiled_product(ctypes.byref(call)), "a product in tiles")
        return out


@_BINDING.self_test
def _products() -> Iterator[Case]:
    generator = torch.Generator().manual_seed(1)
    for rows, outputs, inputs in ((40, 48, 72), (33, 7, 290)):
        sizes = (outputs, inputs), (outputs,), (rows, inputs)
        weight, bias, x = (torch.randn(*size, generator=generator).bfloat16() for size in sizes)
        expected = F.linear(x.double(), weight.double(), bias.double())
        name = f"a product of {rows} rows in tiles"
        yield name, TiledProduct(weight, bias)(x), expected, torch.bfloat16
