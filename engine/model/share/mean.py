"""Means over a width that ranks divide: a norm's over the heads of all ranks, and those that an MLP
cuts its gate at.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class DividedMean:
    """Means of a row's squares over whole widths, of which this rank has a part.

    add: the sum over ranks. widths: of each mean. slots: which of the means this rank's sums belong
    to, in their order. brings: whether it adds each of them, or another rank adds the same.
    """

    def __init__(
        self,
        add: Callable[[torch.Tensor], torch.Tensor],
        widths: tuple[int, ...],
        slots: tuple[int, ...],
        brings: tuple[bool, ...],
    ) -> None:
        self.add, self.widths, self.slots, self.brings = add, widths, slots, brings

    def __call__(self, sums: torch.Tensor) -> torch.Tensor:
        """Map sums of squares float32 [..., len(slots)] to means of the same shape: one collective
        of as many floats as there are widths.
        """
        brought = sums.new_zeros(*sums.shape[:-1], len(self.widths))
        for number, (slot, brings) in enumerate(zip(self.slots, self.brings)):
            if brings:
                brought[..., slot] = sums[..., number]
        whole = self.add(brought)
        means = [whole[..., slot] / self.widths[slot] for slot in self.slots]
        return torch.stack(means, -1)


class DividedSpread:
    """The mean and the standard deviation of rows of which this rank has a part. gathered: a tensor
    of every rank, in their order. sizes: of each rank's part.
    """

    def __init__(
        self, gathered: Callable[[torch.Tensor], torch.Tensor], sizes: tuple[int, ...]
    ) -> None:
        self.gathered, self.sizes = gathered, sizes

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map x [..., own] to both, float32 [..., 1]: one collective of two floats a row. Variances
        of the parts and the distances of their means add up (Chan, Golub and LeVeque 1979).
        """
        variance, mean = torch.var_mean(x.float(), -1, correction=0)
        means, variances = self.gathered(torch.stack((mean, variance))).unbind(1)
        shares = torch.tensor(self.sizes, dtype=torch.float32) / sum(self.sizes)
        shares = shares.view(-1, *(1,) * mean.dim())
        whole = (means * shares).sum(0)
        spread = ((variances + (means - whole).square()) * shares).sum(0).sqrt()
        return whole[..., None], spread[..., None]
