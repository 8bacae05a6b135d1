"""The numbers by which the C++ kernels know what rows and weights hold: kinds.h has the same list,
and tests/kernels_cpu/test_sources.py compares the two.
"""

from __future__ import annotations

from enum import IntEnum

import torch


class Kind(IntEnum):
    """`Kind` of kinds.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2
    INT8 = 3
    INT4 = 4
    FP8 = 5
    INT4_KEYS = 6
    INT4_VALUES = 7


FLOATS = {
    torch.float32: Kind.FLOAT32,
    torch.bfloat16: Kind.BFLOAT16,
    torch.float16: Kind.FLOAT16,
}
# of packed rows (kernels/rows/forms.py) the dtype says the form
PACKED = {torch.int8: Kind.INT8, torch.uint8: Kind.INT4, torch.float8_e4m3fn: Kind.FP8}
ROWS = FLOATS | PACKED
