"""One draw from a distribution by a race of exponential arrival_times, one a token.

Each token's clock is a function of one number and the token's id. Its rate is the token's
probability; the earliest clock wins. Two draws by the same number from nearly the same
distributions are nearly always the same token: with probability at least (1 - d) / (1 + d) at a
total variation distance of d, whatever the order of the vocabulary. Drawing from cumulative sums
lacks this property: a small difference at one token shifts all after it (docs/EXACT.md).

Source: the Gumbel-max trick in its exponential form (Maddison et al., 2014); the mixing of bits is
SplitMix64's (Steele et al., 2014).
"""

from __future__ import annotations

import torch

NUMBERS = 1 << 62  # a race's number is below
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX = (30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64))
_BITS = 52  # of a uniform number: one more would round up to 1


def arrival_times(ids: torch.Tensor, number: int) -> torch.Tensor:
    """Return the arrival time of each token's clock at rate 1: ids int64 [n] -> float64 [n], each
    above 0, exponential with mean 1, the same on every device.
    """
    z = ids * _STEP + number  # wraps, as all below
    for shift, factor in _MIX:
        z = (z ^ _shifted(z, shift)) * factor
    z = z ^ _shifted(z, 31)
    uniform = (_shifted(z, 64 - _BITS).double() + 0.5) * 2.0**-_BITS
    return uniform.log_().neg_()


def draw(probabilities: torch.Tensor, ids: torch.Tensor, number: int) -> torch.Tensor:
    """Draw a token: its index, int64 [1]. A token of probability 0 is never drawn.

    probabilities float [n], their sum need not be 1; ids int64 [n].
    """
    return (arrival_times(ids, number) / probabilities.double()).argmin().view(1)


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right with zeros: torch's own copies the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)
