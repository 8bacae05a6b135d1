"""Rows of activations in 8 bits, as a prompt's products take them where the user asks for that
(docs/QUANTISATION.md): whole numbers up to 127 times the step of each 32 columns.

llama.cpp rounds so what it multiplies by Q8_0 (Q8_0 itself, ggml-quants.c). Here it is the C++
kernel's definition in torch's operators: the same steps and the same whole numbers, so the products
differ by the rounding of float32 sums alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

ROWS = 32  # from which rows are rounded: those of a prompt, not of a decode step
GROUP = 32  # columns that have one step
LARGEST = 127
SMALL, UNIT = 1e-30, 2.0**64  # a group below SMALL has no reciprocal, times UNIT it has


def rounded_rows(x: torch.Tensor) -> torch.Tensor:
    """Round each GROUP columns of x [R, I] to whole numbers of 8 bits and a step, their largest
    magnitude / LARGEST; the last group may be short. Returns float32 [R, I], numbers times steps.

    No number moves by more than half a step. A group with NaN or infinity is NaN.
    """
    whole, step = numbers(x)
    return (whole * step[..., None]).flatten(1)[:, : x.shape[1]]


def numbers(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole numbers, float32 [R, G, GROUP], and the steps, float32 [R, G], of x [R, I]; short
    groups are filled up by zeros.
    """
    wide = F.pad(x.float(), (0, -x.shape[1] % GROUP)).view(len(x), -1, GROUP)
    reach = wide.abs().amax(2)
    unit = torch.where(reach < SMALL, UNIT, 1.0)
    reach = reach * unit
    # divided in float32, as the kernel does: a scalar numerator would be float64 in some builds
    inverse = torch.where(reach > 0, torch.full_like(reach, LARGEST) / reach, 0.0)
    step = torch.where(reach.isfinite(), reach / LARGEST / unit, torch.nan)
    whole = (wide * unit[..., None] * inverse[..., None]).round_().nan_to_num_(0.0)
    return whole, step
