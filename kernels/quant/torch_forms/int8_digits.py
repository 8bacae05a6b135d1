"""int8 rows times rows of floats, as two integer products: of a row's first digits and of what they
leave.

A CPU multiplies 8 bits by 8 bits, and one outlier among activations of 8 bits spoils the others
(3.7% error, docs/LOG.md, 2026-11-22). So a row of x goes in as two rows of 7 bits with one scale:
14 bits, and the weights are read once for both. 7 bits also keep 16-bit sums from saturating, which
AVX2 and AVX512 without VNNI have. Two libraries of torch multiply:

"digits": fbgemm, the faster one for a single row everywhere, and for many rows on AVX2. It pads the
    columns to whole blocks of 512.
"vnni": oneDNN, 1.6 times as fast for many rows on AVX512 with VNNI, and as fast as bfloat16's own
    product of as many rows of floats. It pads columns and rows to 64.
"""

from __future__ import annotations

import functools
import math

import torch

from kernels.launch.isa import isa
from kernels.quant.matrix import Quantised
from kernels.quant.torch_forms.int4_tiles import HALF, fbgemm, integer_product

# rows that are digits at a time: they are four float32 copies; 256 took fbgemm a fifth longer for
# each, and oneDNN as long
PIECE = 128
DEPTH = 512  # fbgemm pads the inner dimension to whole blocks of so many columns
TILE = 64  # oneDNN pads both dimensions


def digit_bytes(shape: tuple[int, int], form: str) -> int:
    """Count the bytes of int8 rows [O, I] in the form "digits" or "vnni"."""
    rows, columns = shape
    # beside the values, per row: its scale, its zero point and its sum, 4 bytes each
    if form == "vnni":
        padded = _whole(rows, TILE)
        return padded * (_whole(columns, TILE) + 4) + 8 * rows
    width = 8 if isa() in ("default", "avx2") else 32
    return _whole(columns, DEPTH) * _whole(rows, width) + 12 * rows


def _whole(count: int, size: int) -> int:
    return -(-count // size) * size


class TwoDigits:
    """An int8 matrix [O, I] with one scale per row, packed for one of the two libraries."""

    def __init__(self, weight: Quantised, form: str) -> None:
        """form: "digits" or "vnni"."""
        self.shape, self.form = weight.shape, form
        if form == "vnni":
            self.packed = torch.ops.onednn.qlinear_prepack(weight.values, None)
            self.scales = weight.scales[:, 0].float().contiguous()
            self.zeros = torch.zeros(len(self.scales), dtype=torch.int32)
        else:
            self.packed = fbgemm(weight)

    def multiply(self, wide: torch.Tensor) -> torch.Tensor:
        """Multiply float32 rows [R, I]: float32 [R, O]."""
        count = len(wide)
        if count <= PIECE:
            return self._piece(wide)
        out = wide.new_empty(count, self.shape[0])
        for start in range(0, count, PIECE):
            part = slice(start, start + PIECE)
            out[part] = self._piece(wide[part])
        return out

    def _piece(self, wide: torch.Tensor) -> torch.Tensor:
        rows = len(wide)
        scale = torch.linalg.vector_norm(wide, math.inf, 1, keepdim=True)
        scale = scale.clamp_min_(1e-30).div_(HALF)
        wide = wide / scale
        first = wide.round()
        both = self._product(torch.cat((first, wide.sub_(first).mul_(2 * HALF))))
        return both[:rows].add_(both[rows:], alpha=1 / (2 * HALF)).mul_(scale)

    def _product(self, digits: torch.Tensor) -> torch.Tensor:
        """Round float32 [R, I] to whole numbers, -63 to 63, and multiply them: float32 [R, O]."""
        if self.form == "digits":
            return integer_product(digits, self.packed)
        # the conversion cuts off what lies behind the point
        whole, held = digits.add_(64.5).to(torch.uint8), (self.packed, self.scales, self.zeros)
        return torch.ops.onednn.qlinear_pointwise(
            whole, 1.0, 64, *held, None, 1.0, 0, torch.float32, "none", [], ""
        )

    def plain(self) -> Quantised:
        """Unpack: a copy of the matrix as it came, without outliers."""
        if self.form == "vnni":
            values, scales = self.packed.to_dense().t().contiguous(), self.scales
        else:
            whole, _ = torch.ops.quantized.linear_unpack(self.packed)
            values, scales = whole.int_repr(), whole.q_per_channel_scales().float()
        return Quantised("int8", values, scales[:, None], self.shape[1])


@functools.cache
def fbgemm_probe() -> bool:
    """Multiply the largest digits by the largest weights, where sums of 16 bits would saturate."""
    return _right("digits")


@functools.cache
def vnni_probe() -> bool:
    """The same in oneDNN, only on CPUs where it may be the faster one."""
    return isa() in ("avx512", "avx512_bf16", "amx") and _right("vnni")


def _right(form: str) -> bool:
    values = torch.full((8, 64), 127, dtype=torch.int8)
    rows = TwoDigits(Quantised("int8", values, torch.ones(8, 1), 64), form)
    found = rows._product(torch.full((2, 64), HALF))
    return bool((found == 64 * 127 * HALF).all()) and torch.equal(rows.plain().values, values)
