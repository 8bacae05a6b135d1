"""The tensors of a GGUF file as a model wants them, one fused target at a time.

llama.cpp stores the rows of q and k of the architecture `llama` with the two halves of each head
interleaved, because its rotary embedding turns neighbours; this engine turns halves. Undoing it
moves whole rows, so it works on packed blocks. So do other orders of rows, and of columns where a
block of them moves together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weights.checkpoint import Cut, LoadProgress, Mapped, Rows, Target
from weights.errors import BadCheckpoint, UnsupportedCheckpoint
from weights.gguf.blocks import FLOATS, FORMS, SIZES, decode
from weights.gguf.header import GGUF, StoredTensor
from weights.jsonfile import shown
from weights.pieces import Runs, Wanted, length, places_in, runs_of
from weights.quantised.stored import Form, Stored, require_finite


@dataclass(frozen=True)
class Place:
    """Where a tensor of the model lies: its name in the file, and heads if rows are interleaved.

    shape: of the stored tensor, where the model's is a part of it. rows: which of its rows (all
    dimensions but the last taken together), in the model's order; None: all. columns: the order of
    blocks of its columns; None: theirs. value: what stands in the file for w: ONE_MORE, 1 + w;
    RATE, -exp(w); "", w itself. Both are floats.
    """

    name: str
    heads: int = 0
    shape: tuple[int, ...] | None = None
    rows: slice | tuple[int, ...] | None = None
    columns: tuple[int, ...] | None = None
    value: str = ""


ONE_MORE, RATE = "one more", "rate"


class GGUFCheckpoint:
    """The tensors of one file, not read yet.

    places: the model's name of a tensor -> its Place. family: of the model, for messages. spare:
    further names that a file may hold.
    """

    def __init__(
        self, file: GGUF, places: Mapping[str, Place], family: str, spare: Iterable[str] = ()
    ) -> None:
        self.file, self.places, self.family = file, places, family
        self.spare = frozenset(spare)

    def require(
        self, targets: Iterable[Target], ignored: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Require that the stored tensors are the wanted ones, no fewer and no more.

        Raises BadCheckpoint for a missing tensor or another shape, UnsupportedCheckpoint for a
        tensor that the model does not have (a bias, an expert).
        """
        wanted = dict(part for target in targets for part in target.stored)
        path = self.file.path
        for name, shape in wanted.items():
            stored = self.file.tensors.get(self.places[name].name)
            shape = self.places[name].shape or shape
            if stored is None or _plain(stored.shape) != _plain(shape):
                what = "nothing" if stored is None else f"shape {list(stored.shape)}"
                raise BadCheckpoint(
                    f"{path}: tensor {self.places[name].name}: found {what}, expected {list(shape)}"
                )
        known = {self.places[name].name for name in wanted} | self.spare
        extra = sorted(name for name in self.file.tensors.keys() - known if not ignored(name))
        if extra:
            raise UnsupportedCheckpoint(
                f"{path}: tensor {shown(extra[0])}: found, but a plain {self.family} has none "
                "(not supported)"
            )

    def forms(self, targets: Iterable[Target]) -> dict[str, tuple[Form | None, ...]]:
        """{target name: the form of each of its parts}, None for floats. Names must be known."""
        return {
            target.name: tuple(
                FORMS.get(self._stored(name).kind) if len(shape) == 2 else None
                for name, shape in target.parts
            )
            for target in targets
        }

    def _stored(self, name: str) -> StoredTensor:
        return self.file.tensors[self.places[name].name]

    def stream(
        self,
        targets: Iterable[Target],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        check_finite: bool = True,
        progress: Callable[[LoadProgress], None] | None = None,
    ) -> Iterator[tuple[str, list[torch.Tensor | Stored]]]:
        """Yield (target.name, its parts) in file order: tensors of `dtype`, or Stored where a part
        is quantised. `require` must have accepted `targets`. Of a rank's share its rows are read,
        and the blocks that hold its columns.

        Raises BadCheckpoint for NaN, infinity, weights beyond the range of `dtype`, and a file that
        has changed since its header was read.
        """
        targets = sorted(targets, key=lambda target: self._stored(target.parts[0][0]).start)
        lists = [self._pieces(target) for target in targets]
        total = sum(piece.nbytes for pieces in lists for piece in pieces)
        done, begun = 0, time.monotonic()
        for target, pieces in zip(targets, lists, strict=True):
            parts: list[torch.Tensor | Stored] = []
            for piece, (_, shape) in zip(pieces, target.parts):
                part = self._read(piece, device, dtype, check_finite)
                parts.append(part.view(shape) if isinstance(part, torch.Tensor) else part)
                done += piece.nbytes
                if progress:
                    progress(LoadProgress(1, 1, done, total, time.monotonic() - begun))
            yield target.name, parts
            del parts

    def read(
        self,
        name: str,
        device: torch.device | str,
        dtype: torch.dtype,
        check_finite: bool = True,
    ) -> torch.Tensor | Stored:
        """Read one tensor, by the model's name. Raises as `stream`."""
        return self._read(self._piece(name, None, None), device, dtype, check_finite)

    def bytes_of(self, targets: Iterable[Target]) -> int:
        """Bytes that `stream` reads for some targets."""
        return sum(piece.nbytes for target in targets for piece in self._pieces(target))

    def _pieces(self, target: Target) -> list[_Piece]:
        """What is read of each part of a target."""
        none = (None,) * len(target.parts)
        return [
            self._piece(name, some, cut)
            for (name, _), some, cut in zip(target.parts, target.rows or none, target.cuts or none)
        ]

    def _piece(self, name: str, some: Rows | None, cut: Cut | None) -> _Piece:
        """What is read of a tensor for some of its rows, and for a cut of these: whole rows, or the
        blocks that hold the columns.
        """
        stored, place = self._stored(name), self.places[name]
        # floats of one dimension are rows of one element
        line = len(stored.shape) == 1 and stored.kind in FLOATS
        height, wide = (stored.elements, 1) if line else (stored.rows, stored.shape[-1])
        rows: Wanted = range(height)
        if isinstance(place.rows, slice):
            rows = rows[place.rows]
        elif place.rows is not None:
            rows = torch.tensor(place.rows)
        if place.heads:
            rows = halves(_tensor(rows), place.heads)
        if some is not None:
            rows = _tensor(rows)[some.numbers]
        columns: Wanted = range(wide)
        if place.columns is not None:
            columns = _tensor(columns).view(len(place.columns), -1)[list(place.columns)].flatten()
        if cut is not None:
            rows = rows[cut.first : cut.stop]
            columns = columns if cut.right is None else columns[cut.left : cut.right]
        block, width = SIZES[stored.kind]
        runs = runs_of(rows, height), runs_of(columns, wide, block)
        size = length(runs[0]) * length(runs[1]) // block * width
        return _Piece(stored, place, rows, columns, runs, size)

    def _read(
        self, piece: _Piece, device: torch.device | str, dtype: torch.dtype, check_finite: bool
    ) -> torch.Tensor | Stored:
        """What a piece is, on a device."""
        stored, place = piece.stored, piece.place
        where = f"{self.file.path}: tensor {stored.name}"
        rows = self._blocks(piece)
        columns = places_in(piece.runs[1], piece.columns)
        if stored.kind in FLOATS:
            found = rows.view(FLOATS[stored.kind])[:, columns]
            found = found.flatten() if len(stored.shape) == 1 else found
            wide = _meant(found, place.value).to(dtype=dtype).contiguous()
            if check_finite and not bool(torch.isfinite(wide).all()):
                beyond = bool(torch.isfinite(found).all()) and place.value != RATE
                what = f"a value beyond the range of {dtype}" if beyond else "NaN or infinity"
                raise BadCheckpoint(f"{where}: found {what}, expected finite weights")
            return wide.to(device)
        if len(stored.shape) != 2 and place.shape is None:
            raise UnsupportedCheckpoint(
                f"{where}: found {stored.kind} in {len(stored.shape)} dimensions, expected 2"
            )
        read = decode(stored.kind, rows)
        # blocks of zeros have a scale of zero
        require_finite(where, read, dtype, zero=True)
        if place.columns is not None:
            width = stored.shape[-1] // len(place.columns)
            if width % read.group:
                raise UnsupportedCheckpoint(
                    f"{where}: found groups of {read.group} columns under one scale, expected "
                    f"heads of {width} to be whole groups (not supported)"
                )
        return read.columns(columns).to(device)

    def _blocks(self, piece: _Piece) -> torch.Tensor:
        """The stored bytes of the wanted rows, in their order, and of all blocks that were read of
        each: uint8 [rows, bytes].
        """
        stored, (block, size) = piece.stored, SIZES[piece.stored.kind]
        width = stored.nbytes // (stored.elements if len(stored.shape) == 1 else stored.rows)
        if len(stored.shape) == 1 and stored.kind not in FLOATS:
            width = stored.nbytes
        spans = [(first // block * size, -(-stop // block) * size) for first, stop in piece.runs[1]]
        file = Mapped(self.file.path, self.file.size)
        try:
            found = file.take(stored.start, width, piece.runs[0], spans)
        finally:
            file.close()
        places = places_in(piece.runs[0], piece.rows)
        return found if places == slice(0, len(found)) else found[places]


class _Piece(NamedTuple):
    """What is read of a tensor: the wanted rows and columns by their numbers in the file, the runs
    of both that hold them, and how many bytes those are.
    """

    stored: StoredTensor
    place: Place
    rows: Wanted
    columns: Wanted
    runs: tuple[Runs, Runs]
    nbytes: int


def _tensor(numbers: Wanted) -> torch.Tensor:
    return torch.arange(numbers.start, numbers.stop) if isinstance(numbers, range) else numbers


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without dimensions of one, which writers leave out."""
    return tuple(size for size in shape if size != 1)


def _meant(found: torch.Tensor, value: str) -> torch.Tensor:
    """The weights that stored floats stand for (Place.value)."""
    if value == ONE_MORE:
        return found.float() - 1
    return (-found.float()).log() if value == RATE else found


def halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [heads * head_dim, ...] whose halves of each head are interleaved -> half after half."""
    apart = rows.view(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return apart.transpose(1, 2).reshape(rows.shape)
