"""A counter-based source of chance: the same numbers give the same bits on any device, in any
order, so that a step that is run again draws again what it drew.
"""

from __future__ import annotations

import torch

MASK = (1 << 31) - 1  # what is left of an int64 after an arithmetic shift by 33


def mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of int64, in place: every output bit depends on every input bit (the finalizer of
    MurmurHash3).
    """
    high = torch.empty_like(x)

    def fold() -> torch.Tensor:
        """x ^= its upper 31 bits."""
        torch.bitwise_right_shift(x, 33, out=high)
        return x.bitwise_xor_(high.bitwise_and_(MASK))

    # 0xff51afd7ed558ccd and 0xc4ceb9fe1a85ec53 as int64
    for factor in (-49064778989728563, -4265267296055464877):
        fold().mul_(factor)
    return fold()
