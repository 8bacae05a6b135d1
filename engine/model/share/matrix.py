"""A matrix of which each rank holds a part: its product is whole once the ranks' are joined."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.layer.linear import Linear
from kernels.quant.linear import QuantisedLinear

Join = Callable[[torch.Tensor], torch.Tensor]


class Joined:
    """A rank's share of a matrix. `join` adds what all ranks multiplied (of columns), or puts it
    side by side (of rows); every rank then has the same bits. gather: what makes the whole input of
    a rank's part of it, where its rows are a rank's and their columns are not; None: the product
    takes the part as it is.
    """

    form = "joined"  # none that kernels of several products read

    def __init__(
        self, inner: Linear | QuantisedLinear, join: Join, gather: Join | None = None
    ) -> None:
        self.inner, self.join, self.gather = inner, join, gather
        self.shape, self.nbytes = inner.shape, inner.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply a rank's x [..., I]: the joined product [..., O]."""
        return self.join(self.inner(self.whole(x)))

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """What `inner` multiplies, of a rank's x [..., I]."""
        return x if self.gather is None else self.gather(x)

    @property
    def native(self) -> bool:
        """Whether the C++ kernels multiply few rows by it."""
        return self.inner.native

    def on_torch(self) -> Joined:
        """Return the same share, of the same memory, multiplied by torch's operators alone."""
        return Joined(self.inner.on_torch(), self.join, self.gather)
