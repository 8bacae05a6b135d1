"""How far a kernel may be from what it is compared with in a self-test: one rule for C++, Triton
and torch's own operators.
"""

from __future__ import annotations

import torch

# of the largest expected element: 16 roundings of 16 bits, and sums of float32 in another order. A
# wrong kernel is off by all of it
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2**-7, torch.bfloat16: 2**-4}


def differs(
    name: str, found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None
) -> str:
    """Say how `found` differs from `expected`, or "".

    dtype: of what was computed, found's by default; whole numbers and packed rows have to be equal.
    NaN differs from everything.
    """
    dtype = found.dtype if dtype is None else dtype
    if dtype not in TOLERANCE:
        same = torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        return "" if same else f"{name} differs"
    found, expected = found.double(), expected.double()
    allowed = TOLERANCE[dtype] * float(expected.abs().max())
    error = float((expected - found).abs().max())
    # also where it is not a number
    return "" if error <= allowed else f"{name} differs by {error:.2g}, allowed {allowed:.2g}"
