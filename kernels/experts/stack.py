"""One matrix of every expert of a layer in one tensor, which a kernel indexes by the number of an
expert that only the device knows.

An expert's own matrix is a view of its rows, so that whoever multiplies by one expert alone reads
the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.quant.words import Words


@dataclass(frozen=True, eq=False)
class Stack:
    """The matrices [O, I] of `count` experts below each other.

    weight: [count * O, I], floats or words. bias: [count * O] in the dtype of activations, or None.
    """

    count: int
    weight: torch.Tensor | Words
    bias: torch.Tensor | None

    @classmethod
    def like(
        cls, count: int, weight: torch.Tensor | Words, bias: torch.Tensor | None = None
    ) -> Stack:
        """Make room for `count` matrices of the form of one [O, I], with its bias [O] or None."""
        if isinstance(weight, torch.Tensor):
            return cls(count, _room(count, weight), None if bias is None else _room(count, bias))
        whole = weight.room(count)
        return cls(count, whole, None if bias is None else _room(count, bias))

    @property
    def outputs(self) -> int:
        """Outputs O of one expert."""
        return self.weight.shape[0] // self.count

    @property
    def inputs(self) -> int:
        """Inputs I of one expert."""
        return self.weight.shape[1]

    def takes(self, weight: torch.Tensor | Words, bias: torch.Tensor | None) -> bool:
        """Whether an expert's matrix and bias are of the form that this holds."""
        form = _form(self.outputs, self.weight, self.bias)
        return form == _form(weight.shape[0], weight, bias)

    def expert(self, number: int) -> tuple[torch.Tensor | Words, torch.Tensor | None]:
        """The matrix [O, I] and the bias [O] of one expert: views."""
        rows = slice(number * self.outputs, (number + 1) * self.outputs)
        bias = None if self.bias is None else self.bias[rows]
        if isinstance(self.weight, torch.Tensor):
            return self.weight[rows], bias
        held = self.weight
        offsets = None if held.offsets is None else held.offsets[rows]
        shape = self.outputs, self.inputs
        values, scales = held.values[rows], held.scales[rows]
        return replace(held, shape=shape, values=values, scales=scales, offsets=offsets), bias

    def put(self, number: int, weight: torch.Tensor | Words, bias: torch.Tensor | None) -> None:
        """Copy an expert's matrix and bias to their place. Mutates this."""
        place, room = self.expert(number)
        for mine, given in ((place, weight), (room, bias)):
            for one, other in zip(_tensors(mine), _tensors(given), strict=True):
                one.copy_(other)


def _room(count: int, like: torch.Tensor) -> torch.Tensor:
    return like.new_empty((count * like.shape[0], *like.shape[1:]))


def _tensors(weight: torch.Tensor | Words | None) -> list[torch.Tensor]:
    if isinstance(weight, Words):
        held = (weight.values, weight.scales, weight.offsets)
        return [t for t in held if t is not None]
    return [] if weight is None else [weight]


def _form(outputs: int, weight: torch.Tensor | Words, bias: torch.Tensor | None) -> tuple:
    """What has to be equal in matrices that lie in one tensor."""
    floats = isinstance(weight, torch.Tensor)
    kind = ("floats", 0) if isinstance(weight, torch.Tensor) else (weight.kind, weight.group)
    parts = [(t.dtype, *t.shape[1:]) for t in (*_tensors(weight), *_tensors(bias))]
    return floats, kind, outputs, weight.shape[1], parts
