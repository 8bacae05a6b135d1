"""MXFP4 (OCP Microscaling Formats 1.0, section 5.2), as gpt-oss stores its experts: 32 columns
share one power of two, and each of them is one of 16 values.

Weights are dequantised to floats while they stream, exactly, since 3 bits of mantissa fit in every
dtype. No 4-bit integer with a scale and an offset is the same, as the values are not evenly spaced;
twice them are integers up to 12, so int8 with a scale for the 32 columns is
(engine/model/low_bits.py).
"""

from __future__ import annotations

import torch

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
COLUMNS = 32  # under one scale
BIAS = 127  # of a scale's exponent; 255 is NaN


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Write the weights of blocks uint8 [R, G, 16], two in a byte and the lower four bits first,
    and scales uint8 [R, G] to out [R, 32 * G] of any float dtype. A NaN scale gives NaN.
    """
    table = torch.tensor([*VALUES, *(-value for value in VALUES)])
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).int()
    wide = torch.ldexp(table[codes], (scales.int() - BIAS).unsqueeze(-1))
    wide.masked_fill_((scales == 255).unsqueeze(-1), float("nan"))
    out.copy_(wide.flatten(1))
