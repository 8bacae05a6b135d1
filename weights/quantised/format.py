"""What a format of quantised checkpoints is to whoever reads one: which stored tensors a matrix is
made of, what form it has, and a pure function from those tensors to a Stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from weights.errors import BadCheckpoint, UnsupportedCheckpoint
from weights.jsonfile import shown
from weights.pieces import Runs, Window, common, divided
from weights.quantised.stored import Form, Stored

FLOATS = ("F16", "BF16", "F32")
MOST_GROUP = 1 << 20


ROWS, INPUTS, GROUPS, ALL = "rows", "inputs", "groups", "all"


@dataclass(frozen=True)
class Part:
    """One stored tensor: names of dtypes that it may have, and its shape. axes: what its two
    dimensions are, where some of them is enough for some of the matrix: (ROWS, of how many rows of
    the matrix an entry is), INPUTS (of columns, as stored), GROUPS (of columns, in the order of
    their groups) or ALL (all entries are read, one or a few); (): read whole, whatever is wanted.
    """

    dtypes: tuple[str, ...]
    shape: tuple[int, ...]
    axes: tuple[tuple[str, int], ...] = ()

    def unit(self, kind: str) -> int:
        """Rows or columns of the matrix that this tensor does not take apart."""
        return common(per for axis, per in self.axes if axis == kind)

    def sizes(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Its two dimensions, where it has some, for a matrix [O, I]."""
        entries = {ROWS: shape[0], INPUTS: shape[1], GROUPS: shape[1], ALL: 1}
        a, b = (-(-entries[axis] // per) for axis, per in self.axes)
        return a, b

    def runs(self, window: Window) -> tuple[Runs, Runs]:
        """The runs of either dimension that a window has."""
        whole = self.sizes(window.shape)
        of = {ROWS: window.rows, INPUTS: window.inputs, GROUPS: (window.columns,)}
        a, b = (
            ((0, size),) if axis == ALL else divided(of[axis], per)
            for (axis, per), size in zip(self.axes, whole)
        )
        return a, b


class Format(Protocol):
    """A format, with its settings. A matrix is known by `base`, its name without ".weight"; `has`
    says whether a stored tensor of this name exists.
    """

    described: str

    def parts(self, base: str, shape: tuple[int, int], has: Any) -> dict[str, Part] | None:
        """{name behind `base`: what is expected} of a matrix [O, I]; None where it is stored as
        floats. Raises BadCheckpoint or UnsupportedCheckpoint for a shape that does not divide.
        """
        ...

    def form(self, shape: tuple[int, int]) -> Form:
        """The form of a matrix [O, I]."""
        ...

    def read(self, where: str, tensors: Mapping[str, torch.Tensor], window: Window) -> Stored:
        """Read what a window has of a matrix, from what it has of the tensors, by the names of
        `parts`. Columns come in the order of their groups where they are not all. where: for
        messages.
        """
        ...

    def spare(self, name: str) -> bool:
        """Whether a stored tensor may stay unread."""
        ...


class Settings:
    """Typed reads of a quantization_config that nobody trusts; every refusal is one line."""

    def __init__(self, data: Any, source: str, prefix: str = "quantization_config.") -> None:
        self.source, self.prefix = source, prefix
        if not isinstance(data, dict):
            self.data: dict[str, Any] = {}
            self.refuse("", data, "an object")
        self.data = data

    def refuse(self, key: str, found: object, expected: str) -> NoReturn:
        """Raise BadCheckpoint: the value makes no sense."""
        raise BadCheckpoint(self._line(key, found, expected))

    def unsupported(self, key: str, found: object, expected: str) -> NoReturn:
        """Raise UnsupportedCheckpoint: the value makes sense, but is not read."""
        raise UnsupportedCheckpoint(self._line(key, found, expected) + " (not supported)")

    def _line(self, key: str, found: object, expected: str) -> str:
        where = (self.prefix + key).rstrip(".")
        return f"{self.source}: {where}: found {shown(found)}, expected {expected}"

    def one(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """A value out of a few."""
        value = self.data.get(key)
        value = default if value is None else value
        if not any(type(value) is type(a) and value == a for a in allowed):
            self.unsupported(key, value, "one of " + ", ".join(map(str, allowed)))
        return value

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.data.get(key)
        value = default if value is None else value
        if type(value) is not bool:
            self.refuse(key, value, "true or false")
        return value

    def group(self, key: str = "group_size") -> int:
        """Columns under one scale; -1 for all."""
        value = self.data.get(key)
        if type(value) is not int or value != -1 and not 1 <= value <= MOST_GROUP:
            self.refuse(key, value, f"-1, or columns from 1 to {MOST_GROUP}")
        return value


def groups_of(where: str, group: int, columns: int) -> tuple[int, int]:
    """(columns under a scale, groups) of rows; group -1: all of them. Raises BadCheckpoint."""
    group = columns if group == -1 else group
    if columns % group:
        raise BadCheckpoint(
            f"{where}: found rows of {columns}, expected a multiple of its groups of {group}"
        )
    return group, columns // group


def unpacked(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Take int32 words [R, C] apart, low bits first: int32 values of `bits` bits along `axis`."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    if axis == 0:
        apart = (words[:, None, :] >> shifts[None, :, None]) & ((1 << bits) - 1)
        return apart.flatten(0, 1)
    apart = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return apart.flatten(1, 2)
