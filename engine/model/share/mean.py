"""Means over a width that ranks divide: a norm's over the heads of all ranks."""

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
