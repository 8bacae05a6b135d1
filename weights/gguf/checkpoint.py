"""The tensors of a GGUF file as a model wants them, one fused target at a time.

llama.cpp stores the rows of q and k of the architecture `llama` with the two halves of each head
interleaved, because its rotary embedding turns neighbours; this engine turns halves. Undoing it
moves whole rows, so it works on packed blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from weights.checkpoint import LoadProgress, Target
from weights.errors import BadCheckpoint, UnsupportedCheckpoint
from weights.gguf.blocks import FLOATS, FORMS, decode
from weights.gguf.header import GGUF, StoredTensor
from weights.jsonfile import shown
from weights.quantised.stored import Form, Stored, require_finite


@dataclass(frozen=True)
class Place:
    """Where a tensor of the model lies: its name in the file, and heads if rows are interleaved."""

    name: str
    heads: int = 0


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
        wanted = dict(part for target in targets for part in target.parts)
        path = self.file.path
        for name, shape in wanted.items():
            stored = self.file.tensors.get(self.places[name].name)
            if stored is None or stored.shape != shape:
                what = "nothing" if stored is None else f"shape {list(stored.shape)}"
                raise BadCheckpoint(
                    f"{path}: tensor {self.places[name].name}: found {what}, expected {list(shape)}"
                )
        known = {self.places[name].name for name in wanted} | self.spare
        extra = sorted(self.file.tensors.keys() - known)
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
        total = sum(self._stored(name).nbytes for target in targets for name, _ in target.parts)
        done, begun = 0, time.monotonic()
        for target in targets:
            parts: list[torch.Tensor | Stored] = []
            for name, _ in target.parts:
                parts.append(self.read(name, device, dtype, check_finite))
                done += self._stored(name).nbytes
                if progress:
                    progress(LoadProgress(1, 1, done, total, time.monotonic() - begun))
            yield target.name, parts
            del parts

    def read(
        self, name: str, device: torch.device | str, dtype: torch.dtype, check_finite: bool = True
    ) -> torch.Tensor | Stored:
        """Read one tensor, by the model's name. Raises as `stream`."""
        stored = self._stored(name)
        where = f"{self.file.path}: tensor {stored.name}"
        raw = torch.frombuffer(self.file.raw(stored), dtype=torch.uint8)
        heads = self.places[name].heads
        if stored.kind in FLOATS:
            found = raw.view(FLOATS[stored.kind]).view(stored.shape)
            wide = found.to(dtype=dtype)
            if check_finite and not bool(torch.isfinite(wide).all()):
                beyond = bool(torch.isfinite(found).all())
                what = f"a value beyond the range of {dtype}" if beyond else "NaN or infinity"
                raise BadCheckpoint(f"{where}: found {what}, expected finite weights")
            return (halves(wide, heads) if heads else wide).to(device)
        if len(stored.shape) != 2:
            raise UnsupportedCheckpoint(
                f"{where}: found {stored.kind} in {len(stored.shape)} dimensions, expected 2"
            )
        rows = raw.view(stored.shape[0], -1)
        read = decode(stored.kind, halves(rows, heads) if heads else rows)
        # blocks of zeros have a scale of zero
        require_finite(where, read, dtype, zero=True)
        return read.to(device)


def halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows [heads * head_dim, ...] whose halves of each head are interleaved -> half after half."""
    apart = rows.view(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return apart.transpose(1, 2).reshape(rows.shape)
