"""A matrix of few bits as a checkpoint stores it: the fields of kernels.quant.matrix.Quantised,
which this package may not import, and what is checked about every one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from weights.checkpoint import Cut
from weights.errors import BadCheckpoint

FP8_MOST = 448.0  # of float8_e4m3fn


class Stored(NamedTuple):
    """W[o, i] = values[o, i] * scales[o, i // group] + offsets[o, i // group].

    kind: "int8" (values int8 [O, I]), "int4" (uint8 [O, I / 2], the even column in the low bits) or
    "fp8" (float8_e4m3fn [O, I]). scales, offsets: floats [O, ceil(I / group)], offsets None for
    zero. permutation: int64 [I], the input that each column belongs to. table: float32 [16], what
    4-bit values stand for.
    """

    kind: str
    values: torch.Tensor
    scales: torch.Tensor
    group: int
    offsets: torch.Tensor | None = None
    permutation: torch.Tensor | None = None
    table: torch.Tensor | None = None

    def rows(self, index: torch.Tensor) -> Stored:
        """Some rows, int64 [n], each with its scales."""
        offsets = None if self.offsets is None else self.offsets[index]
        return self._replace(values=self.values[index], scales=self.scales[index], offsets=offsets)

    def cut(self, cut: Cut) -> Stored:
        """Some rows and columns of it, each with its scales; columns in whole groups, if a row has
        several, and not permuted.
        """
        whole = cut.whole[1]
        left, right = cut.left, whole if cut.right is None else cut.right
        rows, columns, scales, group = slice(cut.first, cut.stop), slice(None), slice(None), 0
        if right - left < whole:
            pair = 2 if self.kind == "int4" else 1
            assert self.permutation is None and left % pair == 0
            assert right == whole or right % pair == 0
            columns = slice(left // pair, -(-right // pair))
            group = right - left
            if self.group < whole:
                assert left % self.group == 0 and (right == whole or right % self.group == 0)
                scales, group = slice(left // self.group, -(-right // self.group)), self.group
        offsets = None if self.offsets is None else self.offsets[rows, scales].contiguous()
        return self._replace(
            values=self.values[rows, columns].contiguous(),
            scales=self.scales[rows, scales].contiguous(),
            offsets=offsets,
            group=group or self.group,
        )

    def columns(self, index: slice | torch.Tensor) -> Stored:
        """Some columns, in another order if they are numbers int64 [n]: whole groups, in which they
        lie as they do here, and not permuted.
        """
        wide = self.values.shape[1] * (2 if self.kind == "int4" else 1)
        if isinstance(index, slice):
            if (index.start, index.stop) == (0, wide):
                return self
            cut = Cut((len(self.values), wide), 0, len(self.values), index.start, index.stop)
            return self.cut(cut)
        assert self.permutation is None
        groups = index.view(-1, self.group)
        first = groups[:, :1]
        assert bool((first % self.group == 0).all())
        assert torch.equal(groups, first + torch.arange(self.group))
        which = first[:, 0] // self.group
        values = self.values.unflatten(1, (self.scales.shape[1], -1))[:, which].flatten(1)
        offsets = None if self.offsets is None else self.offsets[:, which]
        return self._replace(values=values, scales=self.scales[:, which], offsets=offsets)

    def to(self, device: torch.device | str) -> Stored:
        """The same matrix on a device."""
        moved: Any = {
            name: value.to(device)
            for name, value in self._asdict().items()
            if isinstance(value, torch.Tensor)
        }
        return self._replace(**moved)


@dataclass(frozen=True)
class Form:
    """What is known of a Stored from headers alone: kind, columns under one scale, whether there
    are offsets, a permutation, a table.
    """

    kind: str
    group: int
    offsets: bool = False
    permuted: bool = False
    table: bool = False


def packed_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Pack uint8 [O, I] of values up to 15 to uint8 [O, I / 2]: the even column in the low bits."""
    return values[:, 0::2] | (values[:, 1::2] << 4)


def require_finite(where: str, stored: Stored, dtype: torch.dtype, zero: bool = False) -> Stored:
    """Return `stored`. Raises BadCheckpoint for a scale or offset that is NaN or infinite, a NaN
    among fp8 values, and weights beyond the range of `dtype`; for a scale of zero unless `zero`.

    where: file and tensor, for the message.
    """
    for name, part in (("scale", stored.scales), ("offset", stored.offsets)):
        if part is not None and not bool(torch.isfinite(part).all()):
            raise BadCheckpoint(
                f"{where}: found NaN or infinity among its {name}s, expected finite"
            )
    if not zero and bool((stored.scales == 0).any()):
        raise BadCheckpoint(f"{where}: found a scale of 0, expected scales other than 0")
    if stored.kind == "fp8" and bool(((stored.values.view(torch.uint8) & 127) == 127).any()):
        raise BadCheckpoint(f"{where}: found NaN, expected finite weights")
    most = {"int8": 128.0, "int4": 15.0, "fp8": FP8_MOST}[stored.kind]
    if stored.table is not None:
        if not bool(torch.isfinite(stored.table).all()):
            raise BadCheckpoint(f"{where}: found NaN or infinity in its table, expected finite")
        most = float(stored.table.abs().max())
    reach = most * float(stored.scales.abs().max())
    if stored.offsets is not None:
        reach += float(stored.offsets.abs().max())
    if not math.isfinite(reach) or reach > 2 * torch.finfo(dtype).max:
        raise BadCheckpoint(
            f"{where}: found weights up to {reach:.3g}, beyond the range of "
            + str(dtype).removeprefix("torch.")
        )
    return stored
