"""A matrix of which each rank holds a part: its product is whole once the ranks' are joined."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.layer.linear import Linear
from kernels.quant.linear import QuantisedLinear

Join = Callable[[torch.Tensor], torch.Tensor]


class Joined:
    """A rank's share of a matrix. `join` adds what all ranks multiplied (of columns), or puts it
    side by side (of rows); every rank then has the same bits.
    """

    form = "joined"  # none that kernels of several products read

    def __init__(self, inner: Linear | QuantisedLinear, join: Join) -> None:
        self.inner, self.join = inner, join
        self.shape, self.nbytes = inner.shape, inner.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply a rank's x [..., I]: the joined product [..., O]."""
        return self.join(self.inner(x))

    @property
    def native(self) -> bool:
        """Whether the C++ kernels multiply few rows by it."""
        return self.inner.native

    def on_torch(self) -> Joined:
        """Return the same share, of the same memory, multiplied by torch's operators alone."""
        return Joined(self.inner.on_torch(), self.join)
