"""Rounding of a packed bank that gives equal rows for rows which differ by rounding only.

How a prompt was cut decides the last bits of its rows of K and V, and a value that lies half-way
then falls to either side: a step of the scale, which moves logits by up to 0.08. Within a random
sequence the sessions and their oracle therefore share one memory of rows: a row that lies next to
an earlier one is packed as that one was. Everything that handles packed rows is the engine's own.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import torch

from kernels.rows.forms import FORMS

# largest difference of two rows' elements that counts as rounding: sessions that hold the same
# differ by 1e-5, and a step of the scale is 1e-2 or more
NEXT = 2e-4
CELL = 10 * NEXT  # of the grid on which neighbours are looked up
AXES = 3
STRIDES = np.array([1, 2**21, 2**42])  # make one number of a cell's coordinates


class Rounding:
    """pack: what stands in for `exact`, a side's of kernels/rows/forms.py. known: rows it has seen,
    each with what it was packed to. shared: rows packed as an earlier one from which they differ.
    """

    def __init__(self, exact: Callable[..., torch.Tensor]) -> None:
        self.exact = exact
        self.known: list[tuple[np.ndarray, np.ndarray]] = []
        self.cells: dict[int, list[int]] = {}  # numbers of the rows in and next to a cell
        self.shared = 0

    def pack(self, x: torch.Tensor, backend: str = "auto") -> torch.Tensor:
        """Round rows [.., D] to packed rows, those next to a row packed before as that row."""
        packed = self.exact(x, backend)
        rows, out = (
            x.float().flatten(0, -2).numpy(),
            packed.view(torch.uint8).flatten(0, -2).numpy(),
        )
        generator = np.random.default_rng(rows.shape[1])
        axes = generator.standard_normal((rows.shape[1], AXES))
        # of an axis of length 1 neighbours differ by no more than their elements do
        places = rows @ (axes / np.abs(axes).sum(0)) / CELL
        homes = (np.floor(places).astype(np.int64) @ STRIDES).tolist()
        for number, home in enumerate(homes):
            same = self._near(rows[number], home)
            if same is None:
                self._learn(rows[number].copy(), out[number].copy(), places[number])
            elif (same != out[number]).any():
                out[number] = same
                self.shared += 1
        return packed

    def _near(self, row: np.ndarray, home: int) -> np.ndarray | None:
        """What the first row next to this one was packed to; None if there is none."""
        for number in self.cells.get(home, ()):
            other, packed = self.known[number]
            if np.abs(other - row).max() <= NEXT:
                return packed
        return None

    def _learn(self, row: np.ndarray, packed: np.ndarray, place: np.ndarray) -> None:
        by = NEXT / CELL
        sides = [
            range(int(low), int(high) + 1) for low, high in np.floor((place - by, place + by)).T
        ]
        for cell in itertools.product(*sides):
            home = int(np.array(cell) @ STRIDES)
            self.cells.setdefault(home, []).append(len(self.known))
        self.known.append((row, packed))


@contextlib.contextmanager
def one_rounding() -> Iterator[list[Rounding]]:
    """Let every bank round by new Roundings inside: one for K and one for V of every form."""
    made, changed = [], {}
    for dtype, form in FORMS.items():
        keys, values = Rounding(form.keys.pack), Rounding(form.values.pack)
        made += [keys, values]
        changed[dtype] = form._replace(
            keys=form.keys._replace(pack=keys.pack), values=form.values._replace(pack=values.pack)
        )
    with mock.patch.dict(FORMS, changed):
        yield made
