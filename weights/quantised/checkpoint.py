"""The tensors of a folder that comes quantised, checked by their headers and then read one fused
target at a time, as weights/checkpoint.py does with floats.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from weights.checkpoint import DTYPES, WIDE, Checkpoint, Cut, LoadProgress, Target
from weights.errors import BadCheckpoint, UnsupportedCheckpoint
from weights.jsonfile import shown
from weights.quantised.format import FLOATS, Format, Part
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

        A rank's share is cut from tensors that are read whole. Raises BadCheckpoint for NaN,
        infinity, a scale of 0, weights beyond the range of `dtype`, and a file that has changed
        since its header was read.
        """
        targets, begun, done = list(targets), time.monotonic(), 0
        files = {info.file for info in self.tensors.values()}
        total = sum(info.nbytes for info in self.tensors.values())
        for target in targets:
            parts: list[torch.Tensor | Stored] = []
            wanted = torch.float32 if target.form == WIDE else dtype
            rows = target.rows or (None,) * len(target.parts)
            cuts = target.cuts or (None,) * len(target.parts)
            for (name, shape), some, cut in zip(target.stored, rows, cuts):
                part, size = self._read(name, shape, wanted, check_finite)
                if some is not None:
                    part = (
                        part.rows(some.numbers) if isinstance(part, Stored) else part[some.numbers]
                    )
                if cut is not None:
                    part = part.cut(cut) if isinstance(part, Stored) else _cut(part, cut)
                parts.append(part.to(device))
                done += size
                if progress:
                    seconds = time.monotonic() - begun
                    progress(LoadProgress(len(files), len(files), done, total, seconds))
            yield target.name, parts
            del parts

    def _read(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, check_finite: bool
    ) -> tuple[torch.Tensor | Stored, int]:
        """(a tensor of the model or what it is stored as, bytes read)."""
        parts = self._parts(name, shape)
        if parts is None:
            info = self.tensors[name]
            raw = self._raw(info)
            found = raw.to(dtype=dtype)
            if check_finite and not bool(torch.isfinite(found).all()):
                beyond = bool(torch.isfinite(raw).all())
                what = f"a value beyond the range of {dtype}" if beyond else "NaN or infinity"
                raise BadCheckpoint(
                    f"{info.file}: tensor {shown(name)}: found {what}, expected finite weights"
                )
            return found, info.nbytes
        base = name.removesuffix(".weight")
        infos = {suffix: self.tensors[base + suffix] for suffix in parts}
        where = f"{next(iter(infos.values())).file}: tensor {base}"
        tensors = {suffix: self._raw(info) for suffix, info in infos.items()}
        stored = self.format.read(where, tensors, (shape[0], shape[1]))
        return require_finite(where, stored, dtype), sum(info.nbytes for info in infos.values())

    def _raw(self, info: TensorInfo) -> torch.Tensor:
        """A stored tensor in its own dtype."""
        data = bytearray(info.nbytes)
        with open(info.file, "rb") as file:
            file.seek(info.start)
            if file.readinto(data) != info.nbytes:
                raise BadCheckpoint(f"{info.file}: changed while it was read")
        return torch.frombuffer(data, dtype=torch.uint8).view(STORED[info.dtype]).view(info.shape)


def _cut(part: torch.Tensor, cut: Cut) -> torch.Tensor:
    """The rows and columns that `cut` names of floats."""
    rows = part[cut.first : cut.stop]
    return (rows if cut.right is None else rows[:, cut.left : cut.right]).contiguous()
