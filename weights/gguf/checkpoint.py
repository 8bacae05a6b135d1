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

import torch

from weights.checkpoint import LoadProgress, Rows, Target
from weights.errors import BadCheckpoint, UnsupportedCheckpoint
from weights.gguf.blocks import FLOATS, FORMS, decode
from weights.gguf.header import GGUF, StoredTensor
from weights.jsonfile import shown
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
        is quantised. `require` must have accepted `targets`.

        Raises BadCheckpoint for NaN, infinity, weights beyond the range of `dtype`, and a file that
        has changed since its header was read.
        """
        targets = sorted(targets, key=lambda target: self._stored(target.parts[0][0]).start)
        total = sum(self._nbytes(name) for target in targets for name, _ in target.parts)
        done, begun = 0, time.monotonic()
        for target in targets:
            parts: list[torch.Tensor | Stored] = []
            for (name, shape), some in zip(
                target.parts, target.rows or (None,) * len(target.parts)
            ):
                part = self.read(name, device, dtype, check_finite, some)
                parts.append(part.view(shape) if isinstance(part, torch.Tensor) else part)
                done += self._nbytes(name)
                if progress:
                    progress(LoadProgress(1, 1, done, total, time.monotonic() - begun))
            yield target.name, parts
            del parts

    def _nbytes(self, name: str) -> int:
        """Bytes that are read for a tensor."""
        stored, rows = self._stored(name), self.places[name].rows
        if not isinstance(rows, slice):
            return stored.nbytes
        return stored.nbytes // stored.rows * (rows.stop - rows.start)

    def read(
        self,
        name: str,
        device: torch.device | str,
        dtype: torch.dtype,
        check_finite: bool = True,
        some: Rows | None = None,
    ) -> torch.Tensor | Stored:
        """Read one tensor, by the model's name. some: the rows of it that are wanted. Raises as
        `stream`.
        """
        stored, place = self._stored(name), self.places[name]
        where = f"{self.file.path}: tensor {stored.name}"
        span = place.rows if isinstance(place.rows, slice) else None
        raw = torch.frombuffer(self.file.raw(stored, span), dtype=torch.uint8)
        # floats of one dimension are rows of one element
        line = len(stored.shape) == 1 and stored.kind in FLOATS
        rows = raw.view(-1, stored.nbytes // (stored.elements if line else stored.rows))
        if isinstance(place.rows, tuple):
            rows = rows[torch.tensor(place.rows)]
        if place.heads:
            rows = halves(rows, place.heads)
        if some is not None:
            rows = rows[some.numbers]
        if stored.kind in FLOATS:
            found = rows.contiguous().view(FLOATS[stored.kind])
            found = found.flatten() if line else found
            wide = _ordered(_meant(found, place.value), place.columns).to(dtype=dtype)
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
            read = _columns(where, read, place.columns)
        return read.to(device)


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without dimensions of one, which writers leave out."""
    return tuple(size for size in shape if size != 1)


def _meant(found: torch.Tensor, value: str) -> torch.Tensor:
    """The weights that stored floats stand for (Place.value)."""
    if value == ONE_MORE:
        return found.float() - 1
    return (-found.float()).log() if value == RATE else found


def _ordered(matrix: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """A matrix [O, I] with its len(order) blocks of columns in another order."""
    if order is None:
        return matrix
    return matrix.unflatten(1, (len(order), -1))[:, torch.tensor(order)].flatten(1)


def _columns(where: str, stored: Stored, order: tuple[int, ...]) -> Stored:
    """A matrix of few bits with its blocks of columns in another order."""
    wide = stored.values.shape[1] * (2 if stored.kind == "int4" else 1)
    width = wide // len(order)
    if width % stored.group:
        raise UnsupportedCheckpoint(
            f"{where}: found groups of {stored.group} columns under one scale, expected heads of "
            f"{width} to be whole groups (not supported)"
        )
    values, scales = _ordered(stored.values, order), _ordered(stored.scales, order)
    offsets = None if stored.offsets is None else _ordered(stored.offsets, order)
    return stored._replace(values=values, scales=scales, offsets=offsets)


def halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [heads * head_dim, ...] whose halves of each head are interleaved -> half after half."""
    apart = rows.view(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return apart.transpose(1, 2).reshape(rows.shape)
