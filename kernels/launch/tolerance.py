"""How far a kernel may be from what it is compared with in a self-test: one rule for C++, Triton
and torch's own operators.
"""

from __future__ import annotations

import torch

# of the largest expected element: 16 roundings of 16 bits, and sums of float32 in another order. A
# wrong kernel is off by all of it
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2**-7, torch.bfloat16: 2**-4}
# of the norm of all expected elements together: roundings leave 2e-3 of it in bfloat16, a kernel
# that drops the last 64th of its columns 0.12, which TOLERANCE lets pass
OVERALL = 1e-2


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


def differs_overall(
    name: str, found: torch.Tensor, expected: torch.Tensor, allowed: float = OVERALL
) -> str:
    """Say how far `found` is from `expected` by relative Frobenius norm, or "". NaN is far."""
    found, expected = found.double(), expected.double()
    norm = float(expected.norm())
    error = float((expected - found).norm()) / norm if norm else float(found.norm())
    return "" if error <= allowed else f"{name} is off by {error:.2g} of its norm"
