"""The interface of what carries tensors over ranks: all make the same calls in one order."""

from __future__ import annotations

from typing import Protocol

import torch


class CollectiveFailed(RuntimeError):
    """A collective did not come to its end: another rank is gone, or late."""


class Carrier(Protocol):
    """Sums and lists over ranks. Both raise CollectiveFailed; a carrier on a card raises nothing
    there, as its calls return before the card has worked.
    """

    def adds(self, x: torch.Tensor) -> bool:
        """Whether `add` takes x."""
        ...

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x [...] over ranks, of its dtype; x is contiguous, and may be written to.
        Every rank gets the same bits.
        """
        ...

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Write x [...] of every rank to out [ranks, ...], in their order; both contiguous."""
        ...

    def end(self) -> None:
        """Have every rank leave that waits here, or will."""
        ...
