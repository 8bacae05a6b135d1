"""The tensors of a folder that comes quantised, checked by their headers and then read one fused
target at a time, as weights/checkpoint.py does with floats.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from weights.checkpoint import DTYPES, WIDE, Checkpoint, Cut, LoadProgress, Mapped, Target
from weights.errors import BadCheckpoint, UnsupportedCheckpoint
from weights.jsonfile import regular_size, shown
from weights.pieces import Runs, Wanted, Window, common, length, places_in, runs_of, wanted_rows
from weights.quantised.format import FLOATS, GROUPS, INPUTS, ROWS, Format, Part
from weights.quantised.gptq import GPTQ
from weights.quantised.stored import Form, Stored, require_finite
from weights.safetensors_file import TensorInfo

STORED = DTYPES | {
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
}


class QuantisedCheckpoint:
    """The tensors of one folder in a format, not read yet."""

    def __init__(self, folder: Path, format: Format) -> None:
        self.folder, self.format = folder, format
        self.tensors = Checkpoint.open(folder).tensors
        self._sizes = {info.file: regular_size(info.file) for info in self.tensors.values()}

    def _parts(self, name: str, shape: tuple[int, ...]) -> dict[str, Part] | None:
        """What a tensor of the model is made of; None where it is stored as floats."""
        if len(shape) != 2 or not name.endswith(".weight"):
            return None
        base = name.removesuffix(".weight")
        try:
            return self.format.parts(base, (shape[0], shape[1]), self.tensors.__contains__)
        except (BadCheckpoint, UnsupportedCheckpoint) as error:
            raise type(error)(f"{self.folder}: tensor {error}") from None

    def require(
        self, targets: Iterable[Target], ignored: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Require that the stored tensors are the wanted ones, no fewer and no more.

        Raises BadCheckpoint for a missing tensor, a wrong shape or dtype, and a tensor that the
        model does not have; what a format raises.
        """
        known, targets = set[str](), list(targets)
        for name, shape in (part for target in targets for part in target.stored):
            parts = self._parts(name, shape)
            if parts is None:
                self._require(name, Part(FLOATS, shape))
                known.add(name)
                continue
            for suffix, part in parts.items():
                self._require(name.removesuffix(".weight") + suffix, part)
                known.add(name.removesuffix(".weight") + suffix)
        for name, info in self.tensors.items():
            if name not in known and not ignored(name) and not self.format.spare(name):
                raise BadCheckpoint(
                    f"{info.file}: tensor {shown(name)}: found, but config.json describes no such "
                    f"tensor ({self.format.described})"
                )

    def _require(self, name: str, part: Part) -> None:
        expected = f"{' or '.join(part.dtypes)} {list(part.shape)}"
        info = self.tensors.get(name)
        if info is None:
            raise BadCheckpoint(
                f"{self.folder}: tensor {name}: found nothing, expected {expected} "
                f"({self.format.described})"
            )
        # [1] may be written as a scalar, a negative size is a limit
        shapes = [part.shape, ()] if part.shape == (1,) else [part.shape]
        bounded = len(part.shape) == 1 and part.shape[0] < 0
        if bounded and len(info.shape) == 1 and 0 < info.shape[0] <= -part.shape[0]:
            shapes = [info.shape]
        if info.dtype not in part.dtypes or info.shape not in shapes:
            raise BadCheckpoint(
                f"{info.file}: tensor {name}: found {info.dtype} {list(info.shape)}, expected "
                f"{expected} ({self.format.described})"
            )

    def forms(self, targets: Iterable[Target]) -> dict[str, tuple[Form | None, ...]]:
        """{target name: the form of each of its parts}, None for floats. `require` comes first.

        Parts that are permuted in different ways have different forms: what they share is None.
        """
        found: dict[str, tuple[Form | None, ...]] = {}
        for target in targets:
            forms = [
                self.format.form((shape[0], shape[1])) if self._parts(name, shape) else None
                for name, shape in target.stored
            ]
            if _in_order(target):
                forms = [form and replace(form, permuted=False) for form in forms]
            if len(forms) > 1 and any(form and form.permuted for form in forms):
                orders = [
                    self._raw(self.tensors[name.removesuffix(".weight") + ".g_idx"])
                    for name, _ in target.parts
                    if name.removesuffix(".weight") + ".g_idx" in self.tensors
                ]
                if any(not torch.equal(order, orders[0]) for order in orders[1:]):
                    forms = [None if number else form for number, form in enumerate(forms)]
            found[target.name] = tuple(forms)
        return found

    def stream(
        self,
        targets: Iterable[Target],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        check_finite: bool = True,
        progress: Callable[[LoadProgress], None] | None = None,
    ) -> Iterator[tuple[str, list[torch.Tensor | Stored]]]:
        """Yield (target.name, its parts): tensors of `dtype`, or Stored where a part is quantised.

        Of a rank's share only the rows and columns that hold it are read and counted. Where the
        columns of an MLP's last matrix lie in an order of their own (act-order), a rank's part of
        them is whole groups, and the rows of gate and up are those that bring them. Raises
        BadCheckpoint for NaN, infinity, a scale of 0, weights beyond the range of `dtype`, and a
        file that has changed since its header was read.
        """
        targets, begun, done = list(targets), time.monotonic(), 0
        orders = self._orders(targets)
        lists = [list(self._pieces(target, orders)) for target in targets]
        files = {self.tensors[name].file for pieces in lists for p in pieces for name in p.names}
        total = sum(piece.nbytes for pieces in lists for piece in pieces)
        maps: dict[Path, Mapped] = {}
        try:
            for target, pieces in zip(targets, lists, strict=True):
                parts: list[torch.Tensor | Stored] = []
                wanted = torch.float32 if target.form == WIDE else dtype
                for piece in pieces:
                    parts.append(self._read(piece, wanted, check_finite, maps).to(device))
                    done += piece.nbytes
                    if progress:
                        seconds = time.monotonic() - begun
                        progress(LoadProgress(len(files), len(files), done, total, seconds))
                yield target.name, parts
                del parts
        finally:
            for mapped in maps.values():
                mapped.close()

    def bytes_of(self, targets: Iterable[Target]) -> int:
        """Bytes that `stream` reads for some targets."""
        targets = list(targets)
        orders = self._orders(targets)
        return sum(piece.nbytes for target in targets for piece in self._pieces(target, orders))

    def _orders(self, targets: Iterable[Target]) -> dict[str, torch.Tensor]:
        """{MLP: the columns of its last matrix in the order of their groups} of those of which a
        share has some: the MLP as the model's targets name it, without ".down".
        """
        found: dict[str, torch.Tensor] = {}
        if not isinstance(self.format, GPTQ) or not self.format.permuted:
            return found
        for target in targets:
            name, shape = target.stored[0]
            base = name.removesuffix(".weight")
            if _in_order(target) and base + ".g_idx" in self.tensors:
                info = self.tensors[base + ".g_idx"]
                index = self._raw(info).long()
                order = self.format.order(f"{info.file}: tensor {base}", index, shape[1])
                found[target.name.removesuffix("down")] = order
        return found

    def _pieces(self, target: Target, orders: dict[str, torch.Tensor]) -> Iterator[_Piece]:
        """What is read of each part of a target."""
        kind = target.name.removesuffix(".bias")
        order = orders.get(kind.removesuffix("gate_up")) if kind.endswith("gate_up") else None
        held = orders.get(kind.removesuffix("down")) if _in_order(target) else None
        rows = target.rows or (None,) * len(target.parts)
        cuts = target.cuts or (None,) * len(target.parts)
        for (name, shape), some, cut in zip(target.stored, rows, cuts):
            wanted = wanted_rows(shape[0], some, cut, order)
            columns = (0, shape[1] if len(shape) == 2 else math.prod(shape[1:]))
            if cut is not None and cut.right is not None:
                columns = cut.left, cut.right
            yield self._piece(name, shape, wanted, columns, held)

    def _piece(
        self,
        name: str,
        shape: tuple[int, ...],
        rows: Wanted,
        columns: tuple[int, int],
        order: torch.Tensor | None,
    ) -> _Piece:
        """What is read for some rows and columns of a stored matrix or vector."""
        made, base = self._parts(name, shape), name
        parts = made or {"": Part(FLOATS, shape, ((ROWS, 1), (INPUTS, 1)))}
        if made is not None:
            base = name.removesuffix(".weight")
        flat = shape[0], math.prod(shape[1:])
        word, group, height = (
            common(part.unit(axis) for part in parts.values()) for axis in (INPUTS, GROUPS, ROWS)
        )
        if order is None:
            word = group = common((word, group))
        (own,) = runs_of(range(*columns), flat[1], group)
        inputs: Runs = (own,)
        if order is not None:
            inputs = runs_of(order[slice(*own)], flat[1], word)
        window = Window(flat, runs_of(rows, flat[0], height), inputs, own)
        size = 0
        for suffix, part in parts.items():
            info = self.tensors[base + suffix]
            entry = info.nbytes // max(1, math.prod(info.shape))
            cells = [length(runs) for runs in part.runs(window)] if part.axes else info.shape
            size += entry * math.prod(cells)
        names = tuple(base + suffix for suffix in parts)
        return _Piece(name, shape, rows, columns, window, made, names, size)

    def _read(
        self, piece: _Piece, dtype: torch.dtype, check_finite: bool, maps: dict[Path, Mapped]
    ) -> torch.Tensor | Stored:
        """A tensor of the model, or what it is stored as."""
        name, window = piece.name, piece.window
        rows = places_in(window.rows, piece.rows)
        left, right = (at - window.columns[0] for at in piece.columns)
        if piece.parts is None:
            part = Part(FLOATS, piece.shape, ((ROWS, 1), (INPUTS, 1)))
            raw = self._some(self.tensors[name], part, window, maps)[rows]
            raw = raw.view(len(raw), *piece.shape[1:]) if window.all_columns else raw
            found = raw.to(dtype=dtype)
            if check_finite and not bool(torch.isfinite(found).all()):
                beyond = bool(torch.isfinite(raw).all())
                what = f"a value beyond the range of {dtype}" if beyond else "NaN or infinity"
                raise BadCheckpoint(
                    f"{self.tensors[name].file}: tensor {shown(name)}: found {what}, expected "
                    "finite weights"
                )
            return found.contiguous()
        base = name.removesuffix(".weight")
        where = f"{self.tensors[piece.names[0]].file}: tensor {base}"
        tensors = {
            suffix: self._some(self.tensors[base + suffix], part, window, maps)
            for suffix, part in piece.parts.items()
        }
        stored = require_finite(where, self.format.read(where, tensors, window), dtype)
        if isinstance(rows, torch.Tensor):
            stored, rows = stored.rows(rows), slice(0, len(rows))
        if (rows.start, rows.stop, left, right) == (0, window.own[0], 0, window.own[1]):
            return stored
        return stored.cut(Cut(window.own, rows.start, rows.stop, left, right))

    def _some(
        self, info: TensorInfo, part: Part, window: Window, maps: dict[Path, Mapped]
    ) -> torch.Tensor:
        """What a window has of a stored tensor, in its own dtype: all of its shape, or two
        dimensions.
        """
        if not part.axes or window == Window.of(window.shape):
            return self._raw(info)
        file = maps.get(info.file)
        if file is None:
            file = maps[info.file] = Mapped(info.file, self._sizes[info.file])
        dtype = STORED[info.dtype]
        rows, columns = part.runs(window)
        width = part.sizes(window.shape)[1] * dtype.itemsize
        spans = [(first * dtype.itemsize, stop * dtype.itemsize) for first, stop in columns]
        return file.take(info.start, width, rows, spans).view(dtype)

    def _raw(self, info: TensorInfo) -> torch.Tensor:
        """A stored tensor in its own dtype."""
        data = bytearray(info.nbytes)
        with open(info.file, "rb") as file:
            file.seek(info.start)
            if file.readinto(data) != info.nbytes:
                raise BadCheckpoint(f"{info.file}: changed while it was read")
        return torch.frombuffer(data, dtype=torch.uint8).view(STORED[info.dtype]).view(info.shape)


class _Piece(NamedTuple):
    """What is read of one stored matrix or vector, by the model's name of it, of a whole shape.

    rows: the wanted ones, in their order; columns: (first, one past the last), as they are held.
    window: what is read, whole units that hold them. parts: what the matrix is made of; None where
    it is stored as floats. names: of the stored tensors; nbytes: read of all of them.
    """

    name: str
    shape: tuple[int, ...]
    rows: Wanted
    columns: tuple[int, int]
    window: Window
    parts: dict[str, Part] | None
    names: tuple[str, ...]
    nbytes: int


def _in_order(target: Target) -> bool:
    """Whether a target is some columns of an MLP's last matrix, which are held in the order of
    their groups: what brings them is cut by rows, and rows are free.
    """
    cut = target.cuts[0] if target.cuts else None
    if cut is None or cut.right is None or not target.name.endswith("down"):
        return False
    return cut.right - cut.left < cut.whole[1]
