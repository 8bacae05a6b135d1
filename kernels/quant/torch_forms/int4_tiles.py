"""torch's products with integer weights on a CPU: whether they are there and right, and how they
lay weights out.

fbgemm's int8 product hides its layout. The 4-bit product lays rows out in tiles: a tile holds, for
each column, the first half of its rows in the low bits of a byte and the second half in the high
bits.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch

from kernels.quant.matrix import BLOCK, Quantised, nibbles

HALF = 63.0  # a digit lies in -63..63, stored around 64


def fbgemm(weight: Quantised) -> torch.Tensor:
    """Pack int8 rows for fbgemm: an opaque object."""
    with warnings.catch_warnings():
        # quantised tensors are deprecated; fbgemm has no other door
        warnings.simplefilter("ignore")
        made = torch._make_per_channel_quantized_tensor(
            weight.values,
            weight.scales[:, 0].double(),
            torch.zeros(weight.shape[0], dtype=torch.int64),
            0,
        )
        return torch.ops.quantized.linear_prepack(made, None)


def integer_product(digits: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Round float32 [R, I] to whole numbers, -64 to 63, and multiply them by packed int8 rows:
    float32.
    """
    return torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
        digits, 1.0, 64, packed
    )


def works(probe: Callable[[], bool]) -> bool:
    """Whether an operator is there and right: `probe` says so, and an error says no."""
    try:
        return probe()
    except (RuntimeError, AttributeError, NotImplementedError):
        return False


@functools.cache
def tile_rows() -> int:
    """Rows of a tile of the 4-bit product's layout, 64 or 32; 0 where the op is missing or lays its
    nibbles out in another way.
    """

    def probe() -> int:
        values = torch.arange(128 * 32, dtype=torch.int32).view(128, 32) % 15
        found = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1).flatten()
        for tile in (64, 32, 16):
            halves = values.view(-1, 2, tile // 2, 32).to(torch.uint8)
            expected = (halves[:, 0] | (halves[:, 1] << 4)).transpose(1, 2)
            if torch.equal(expected.flatten(), found):
                return tile
        return 0

    try:
        return probe()
    except (RuntimeError, AttributeError, NotImplementedError):
        return 0


class Tiles:
    """A 4-bit matrix [O, I] in the layout of torch's product for bfloat16 rows.

    It stands for (q - 8) * scale + zero, with bfloat16 scales and zeros [I / group, O, 2].
    """

    def __init__(
        self, values: Callable[[slice], torch.Tensor], shape: tuple[int, int], group: int
    ) -> None:
        """values(rows): uint8 [rows, I] of 0 to 15. `zeros` is set by whoever made this."""
        self.shape, self.group = shape, group
        rows, columns = shape
        # packed some tiles at a time, because the op wants 32 bits an element
        step = max(1, BLOCK // columns // 64) * 64
        self.packed = torch.empty(rows, columns // 2, dtype=torch.uint8)
        for start in range(0, rows, step):
            part = slice(start, min(start + step, rows))
            self.packed[part] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(
                values(part).int(), 1
            ).view(-1, columns // 2)
        self.zeros = torch.empty(0)

    @classmethod
    def of(cls, weight: Quantised) -> Tiles:
        """The tiles of an int4 weight: q * s + o = (q - 8) * s + (o + 8 s), s as it is rounded."""
        found = cls(lambda part: nibbles(weight.values[part]), weight.shape, weight.group)
        scales = weight.scales.to(torch.bfloat16).float()
        found._scale(scales, 8 * scales, weight.offsets)
        return found

    @classmethod
    def pair(cls, weight: Quantised) -> tuple[Tiles, Tiles]:
        """The high and the low four bits of an int8 weight: with u = q + 128 = 16 h + l,
        q s + o = (h - 8) * 16 s + (l - 8) * s + (8 s + o).
        """
        whole = weight.values.view(torch.uint8)
        scales = weight.scales.to(torch.bfloat16).float()
        high = cls(lambda part: (whole[part] ^ 128) >> 4, weight.shape, weight.group)
        low = cls(lambda part: whole[part] & 15, weight.shape, weight.group)
        high._scale(16 * scales, torch.zeros_like(scales), None)
        low._scale(scales, 8 * scales, weight.offsets)
        return high, low

    def _scale(
        self, scales: torch.Tensor, zeros: torch.Tensor, offsets: torch.Tensor | None
    ) -> None:
        if offsets is not None:
            zeros = zeros + offsets.float()
        self.zeros = torch.stack((scales.t(), zeros.t()), -1).to(torch.bfloat16).contiguous()

    def multiply(self, flat: torch.Tensor) -> torch.Tensor:
        """Multiply bfloat16 rows [R, I]: [R, O]."""
        return torch.ops.aten._weight_int4pack_mm_for_cpu(flat, self.packed, self.group, self.zeros)

    def rows(self, rows: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantise some rows, a slice or int64 indices: [rows, I] of `dtype`."""
        half = tile_rows() // 2
        tiles = self.packed.view(-1, self.shape[1], half)
        if isinstance(rows, slice):
            rows = torch.arange(*rows.indices(self.shape[0]))
        inside = rows % (2 * half)
        both = tiles[rows // (2 * half), :, inside % half]
        shift = torch.where(inside < half, 0, 4).to(torch.uint8)[:, None]
        values = ((both >> shift) & 15).float().view(len(rows), -1, self.group) - 8
        pairs = self.zeros[:, rows].float().transpose(0, 1)  # [rows, groups, 2]
        return (values * pairs[..., :1] + pairs[..., 1:]).flatten(1).to(dtype)
