"""Find and check a model folder's weights without reading tensor data, then stream them one fused
tensor at a time.

`Checkpoint.open` reads headers only. `require` compares names, shapes and dtypes with the model's,
in both directions. `stream` maps the files, copies each tensor once, straight to its device and
dtype, and releases the mapped pages behind it. Host memory in use is the tensors handed out plus
CHUNK, whatever the size of the files.
"""

from __future__ import annotations

import math
import mmap
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from weights.errors import BadCheckpoint, UnsupportedCheckpoint
from weights.jsonfile import INDEX_LIMIT, inside, present, read_object, regular_size, shown
from weights.mxfp4 import dequantise
from weights.safetensors_file import FLOATS, TensorInfo, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LONGEST_NAME = 255  # characters of a file's name, by every file system
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
BYTES = DTYPES | {"U8": torch.uint8}  # and what MXFP4 is stored in
# bytes copied, checked and released at a time; 1 to 32 MB measured alike (bound by page faults)
CHUNK = 4 << 20

Empty = Callable[[tuple[int, ...], torch.dtype, torch.device | str], torch.Tensor]


def _torch_empty(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


# forms of a target that is not stored as it is wanted
TURNED, MXFP4, WIDE = "turned", "mxfp4", "wide"


class Rows(NamedTuple):
    """Rows of a stored tensor that a part is: those `first` .. stop-1 of each of `groups` groups of
    `size` rows. pairs: of those as many last ones lie in pairs, row by row; the part has the first
    of every pair, and then the second.
    """

    groups: int
    size: int
    first: int
    stop: int
    pairs: int = 0

    @property
    def numbers(self) -> torch.Tensor:
        """Which rows of the stored tensor these are, in the part's order: int64."""
        found = torch.arange(self.groups * self.size).view(self.groups, self.size)
        found = found[:, self.first : self.stop]
        plain, paired = found.split([found.shape[1] - self.pairs, self.pairs], 1)
        return torch.cat((plain, paired[:, 0::2], paired[:, 1::2]), 1).flatten()


class Cut(NamedTuple):
    """What a part is of a larger one that is stored: rows `first` .. stop-1, and of those the
    columns left .. right-1, or entries of the second dimension where there are more. whole: the
    larger one's shape; right: None for all columns.
    """

    whole: tuple[int, ...]
    first: int
    stop: int
    left: int = 0
    right: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The part's shape."""
        rows = self.stop - self.first
        if self.right is None:
            return rows, *self.whole[1:]
        return rows, self.right - self.left, *self.whole[2:]


@dataclass(frozen=True)
class Target:
    """A tensor that the model wants: its name in the model, and the stored parts (name, shape) to
    join along dim 0, in this order.

    entry: (number, count) of a target that is one of `count` in stacked tensors, whose parts'
    shapes are those of one. form: TURNED, a matrix stored as its transpose; MXFP4, whose parts are
    blocks and scales (weights/mxfp4.py); WIDE, float32 whatever the model's dtype; "" for none of
    them. rows: of each part's stored tensor, where the part is not all of it; () for a target whose
    parts all are. cuts: of each part, where a process holds a share of it, as it is stored and
    after `rows`; None: all of it; () for a target that is whole.
    """

    name: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    entry: tuple[int, int] | None = None
    form: str = ""
    rows: tuple[Rows | None, ...] = ()
    cuts: tuple[Cut | None, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor that the model gets."""
        first = self.parts[0][1]
        if self.form == MXFP4:
            return first[0], 2 * first[1] * first[2]
        if self.form == TURNED:
            return first[1], first[0]
        return sum(shape[0] for _, shape in self.parts), *first[1:]

    @property
    def stored(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(name, shape) of the stored tensors that the parts are, or are entries of."""
        count = () if self.entry is None else (self.entry[1],)
        rows = self.rows or (None,) * len(self.parts)
        cuts = self.cuts or (None,) * len(self.parts)
        wholes = (
            (name, shape if cut is None else cut.whole)
            for (name, shape), cut in zip(self.parts, cuts)
        )
        return tuple(
            (name, (*count, *(shape if some is None else (some.groups * some.size, *shape[1:]))))
            for (name, shape), some in zip(wholes, rows)
        )


@dataclass(frozen=True)
class LoadProgress:
    """How far a load has come: shard files begun, of `shards`; stored bytes read, of `bytes_total`;
    seconds since the start.
    """

    shard: int
    shards: int
    bytes_done: int
    bytes_total: int
    seconds: float


class Checkpoint:
    """The tensors of one model folder, not read yet.

    `tensors` maps names to TensorInfo; `total_bytes` is their stored size.
    """

    def __init__(
        self, folder: Path, tensors: dict[str, TensorInfo], empty: Empty = _torch_empty
    ) -> None:
        self.folder, self.tensors, self._empty = folder, tensors, empty
        self.total_bytes = sum(info.nbytes for info in tensors.values())
        self._sizes = {info.file: regular_size(info.file) for info in tensors.values()}

    @classmethod
    def open(cls, folder: str | Path, empty: Empty = _torch_empty) -> Checkpoint:
        """Read the index and every safetensors header of `folder`; no tensor data. empty(shape,
        dtype, device) makes the tensors that `stream` fills.

        Raises BadCheckpoint if the folder is damaged, incomplete or contradictory, and
        UnsupportedCheckpoint for an unknown dtype or a folder with only pickle or GGUF files.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise BadCheckpoint(
                f"{folder}: found no folder, expected a model in Hugging Face layout"
            )
        if present(folder / SINGLE):  # before the index, as transformers does
            return cls(folder, read_header(inside(folder, SINGLE)), empty)
        if present(folder / INDEX):
            return cls(folder, _read_index(folder), empty)
        raise _no_weights(folder)

    def require(
        self, targets: Iterable[Target], ignored: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Require that the stored tensors are the wanted ones, no fewer and no more.

        ignored(name) tells which stored tensors may stay unread. Raises UnsupportedCheckpoint for a
        dtype other than float32, bfloat16 and float16; BadCheckpoint for a missing tensor, a wrong
        shape, or a tensor that the model does not have.
        """
        targets = list(targets)
        wanted = {name: shape for target in targets for name, shape in target.stored}
        packed = {name for target in targets if target.form == MXFP4 for name, _ in target.parts}
        for name, info in self.tensors.items():
            if name in packed and info.dtype != "U8":
                raise BadCheckpoint(
                    f"{info.file}: tensor {shown(name)}: found dtype {info.dtype}, expected U8 "
                    "(MXFP4)"
                )
            if info.dtype not in FLOATS and not ignored(name) and name not in packed:
                raise UnsupportedCheckpoint(
                    f"{info.file}: tensor {shown(name)}: quantised formats not supported yet: "
                    f"found dtype {info.dtype}, expected one of {', '.join(FLOATS)}"
                )
        missing = [name for name in wanted if name not in self.tensors]
        extra = [name for name in self.tensors if name not in wanted and not ignored(name)]
        if missing:
            hint = f" ({len(missing)} missing)" if len(missing) > 1 else ""
            if missing[0] == "lm_head.weight":
                hint += "; tie_word_embeddings is false in config.json"
            if extra:
                hint += f"; the first unknown tensor is {shown(extra[0])}"
            raise BadCheckpoint(
                f"{self.folder}: tensor {missing[0]}: found nothing, "
                f"expected shape {list(wanted[missing[0]])}{hint}"
            )
        for name, shape in wanted.items():
            info = self.tensors[name]
            if info.shape != tuple(shape):
                raise BadCheckpoint(
                    f"{info.file}: tensor {name}: found shape {list(info.shape)}, "
                    f"expected {list(shape)} as config.json says"
                )
        if extra:
            more = f" ({len(extra)} such tensors)" if len(extra) > 1 else ""
            file = self.tensors[extra[0]].file
            raise BadCheckpoint(
                f"{file}: tensor {shown(extra[0])}: found, "
                f"but config.json describes no such tensor{more}"
            )

    def stream(
        self,
        targets: Iterable[Target],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        check_finite: bool = True,
        progress: Callable[[LoadProgress], None] | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (target.name, tensor) in file order: contiguous, of `dtype`, on `device`.

        `require` must have accepted `targets`. The caller owns the tensor: nothing here keeps it or
        shares memory with the files. progress is called after every stored tensor. With
        check_finite, raises BadCheckpoint for NaN, infinity or a value beyond the range of `dtype`.
        Raises BadCheckpoint if a file has changed since `open`.
        """
        targets = sorted(targets, key=self._position)
        files = {self.tensors[name].file for target in targets for name, _ in target.parts}
        total = sum(sum(self._stored_bytes(target)) for target in targets)
        read = _Progress(len(files), total, progress)
        maps: dict[Path, Mapped] = {}
        try:
            # the tensor gets no name here: a suspended generator would keep it alive
            for target in targets:
                yield target.name, self._fused(target, device, dtype, check_finite, maps, read)
        finally:
            for mapped in maps.values():
                mapped.close()

    def _fused(
        self,
        target: Target,
        device: torch.device | str,
        dtype: torch.dtype,
        check_finite: bool,
        maps: dict[Path, Mapped],
        read: _Progress,
    ) -> torch.Tensor:
        """Read one target's tensor, its parts below each other; map files into `maps`."""
        infos = [(name, self._part(target, name)) for name, _ in target.parts]
        for _, info in infos:
            if info.file not in maps:
                maps[info.file] = Mapped(info.file, self._sizes[info.file])
        if target.form == MXFP4:
            out = self._dequantised(target, infos, dtype, check_finite, maps).to(device)
        else:
            turned = target.form == TURNED
            shape = target.parts[0][1] if turned else target.shape
            dtype = torch.float32 if target.form == WIDE else dtype
            out, row = self._empty(shape, dtype, device), 0
            whole = target.rows or (None,) * len(infos)
            cuts = target.cuts or (None,) * len(infos)
            for (name, info), (_, part), some, cut in zip(infos, target.parts, whole, cuts):
                below = out[row : row + part[0]]
                row += part[0]
                file = maps[info.file]
                if some is not None:
                    file.copy_groups(name, info, some, cut, below, check_finite)
                elif cut is not None:
                    file.copy_cut(name, info, cut, below, check_finite)
                else:
                    file.copy(name, info, below.view(-1), check_finite)
            out = out.t().contiguous() if turned else out
        for (_, info), size in zip(infos, self._stored_bytes(target)):
            read.advance(info, size)
        return out

    def _stored_bytes(self, target: Target) -> list[int]:
        """Bytes that each part of a target is read from."""
        sizes = [self._part(target, name).nbytes for name, _ in target.parts]
        cuts = target.cuts or (None,) * len(sizes)
        return [
            size if cut is None else size // math.prod(cut.whole) * math.prod(cut.shape)
            for size, cut in zip(self._of_rows(target, sizes), cuts)
        ]

    def _of_rows(self, target: Target, sizes: list[int]) -> list[int]:
        """`sizes` of a target's stored parts, of those parts' own rows alone."""
        rows = target.rows or (None,) * len(sizes)
        return [
            size if some is None else size // some.size * (some.stop - some.first)
            for size, some in zip(sizes, rows)
        ]

    def _dequantised(
        self,
        target: Target,
        infos: list[tuple[str, TensorInfo]],
        dtype: torch.dtype,
        check_finite: bool,
        maps: dict[Path, Mapped],
    ) -> torch.Tensor:
        """Read blocks and scales, and return the weights."""
        blocks, scales = (torch.empty(shape, dtype=torch.uint8) for _, shape in target.parts)
        cuts = target.cuts or (None, None)
        for (name, info), cut, raw in zip(infos, cuts, (blocks, scales)):
            if cut is None:
                maps[info.file].copy(name, info, raw.view(-1), False)
            else:
                maps[info.file].copy_cut(name, info, cut, raw, False)
        out = torch.empty(target.shape, dtype=dtype)
        dequantise(blocks, scales, out)
        if check_finite and not _all_finite(out.view(-1)):
            name, info = infos[1]
            raise BadCheckpoint(
                f"{info.file}: tensor {shown(name)}: found a scale that is NaN or beyond the range "
                f"of {str(dtype).removeprefix('torch.')}, expected finite weights"
            )
        return out

    def _part(self, target: Target, name: str) -> TensorInfo:
        """Where a target's part lies: a stored tensor, or its entry of one."""
        info = self.tensors[name]
        if target.entry is None:
            return info
        number, count = target.entry
        size = info.nbytes // count
        first = info.start + number * size
        return replace(info, start=first, stop=first + size)

    def _position(self, target: Target) -> tuple[Path, int]:
        info = self._part(target, target.parts[0][0])
        return info.file, info.start


class _Progress:
    """Counts what was read and reports it."""

    def __init__(
        self, shards: int, total: int, report: Callable[[LoadProgress], None] | None
    ) -> None:
        self.shards, self.total, self.report = shards, total, report
        self.files: set[Path] = set()
        self.done, self.begun = 0, time.monotonic()

    def advance(self, info: TensorInfo, size: int) -> None:
        self.files.add(info.file)
        self.done += size
        if self.report:
            seconds = time.monotonic() - self.begun
            self.report(LoadProgress(len(self.files), self.shards, self.done, self.total, seconds))


class Mapped:
    """One file, mapped read-only while it streams. size: bytes that it had when its header was
    read.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        with open(path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:  # a map beyond a shrunken file would end in SIGBUS, not in a message
                raise BadCheckpoint(
                    f"{path}: changed while loading: found {found} bytes, expected {size}"
                )
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def copy(self, name: str, info: TensorInfo, out: torch.Tensor, check_finite: bool) -> None:
        """Convert the stored tensor into `out` (flat, any dtype and device) chunk by chunk, and
        release the pages behind.
        """
        source = BYTES[info.dtype]
        # the check waits for the device once per chunk
        chunk = CHUNK if out.device.type == "cpu" else 16 * CHUNK
        step = chunk // source.itemsize
        aligned = info.start % source.itemsize == 0
        for at in range(0, out.numel(), step):
            count = min(step, out.numel() - at)
            start = info.start + at * source.itemsize
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "buffer is not writable": it is only read
                raw = torch.frombuffer(
                    self.map, dtype=torch.uint8, count=count * source.itemsize, offset=start
                )
            piece = (raw if aligned else raw.clone()).view(source)
            out[at : at + count].copy_(piece)
            if check_finite and not _all_finite(out[at : at + count]):
                raise self._not_finite(name, piece, out[at : at + count])
            del raw, piece  # a live view would keep the map from closing
            self._release(start, start + count * source.itemsize)

    def copy_cut(
        self, name: str, info: TensorInfo, cut: Cut, out: torch.Tensor, check_finite: bool
    ) -> None:
        """Convert the rows and columns that `cut` names of the stored tensor into `out`."""
        size = info.nbytes // cut.whole[0]  # of a stored row
        start = info.start + cut.first * size
        place = replace(info, start=start, stop=start + (cut.stop - cut.first) * size)
        if cut.right is None:
            self.copy(name, place, out.view(-1), check_finite)
            return
        wide = cut.whole[1]
        # few rows at a time, of which only the columns are looked at
        rows = max(1, CHUNK // size)
        for row in range(0, out.shape[0], rows):
            mine = out[row : row + rows]
            at = place.start + row * size
            span = len(mine) * size
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # as in `copy`
                raw = torch.frombuffer(self.map, dtype=torch.uint8, count=span, offset=at)
            aligned = at % BYTES[info.dtype].itemsize == 0
            stored = (raw if aligned else raw.clone()).view(BYTES[info.dtype])
            piece = stored.view(-1, wide, *cut.whole[2:])
            mine.copy_(piece[:, cut.left : cut.right])
            if check_finite and not _all_finite(mine):
                raise self._not_finite(name, piece[:, cut.left : cut.right], mine)
            del raw, stored, piece  # as in `copy`
            self._release(at, at + span)

    def take(
        self,
        start: int,
        width: int,
        rows: Sequence[tuple[int, int]],
        columns: Sequence[tuple[int, int]],
    ) -> torch.Tensor:
        """Copy some runs of rows of `width` bytes, the first at `start`, and of these some runs of
        bytes: uint8 [rows, bytes].
        """
        height = sum(stop - first for first, stop in rows)
        out = torch.empty(height, sum(stop - first for first, stop in columns), dtype=torch.uint8)
        step, at = max(1, CHUNK // width), 0
        for first, stop in rows:
            for row in range(first, stop, step):
                count = min(step, stop - row)
                place, span = start + row * width, count * width
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # as in `copy`
                    raw = torch.frombuffer(self.map, dtype=torch.uint8, count=span, offset=place)
                stored, left = raw.view(count, width), 0
                for begin, end in columns:
                    into = out[at : at + count, left : left + end - begin]
                    into.copy_(stored[:, begin:end])
                    left += end - begin
                del raw, stored  # as in `copy`
                self._release(place, place + span)
                at += count
        return out

    def copy_groups(
        self,
        name: str,
        info: TensorInfo,
        some: Rows,
        cut: Cut | None,
        out: torch.Tensor,
        check_finite: bool,
    ) -> None:
        """Convert the rows of each group, or those that `cut` leaves of them, into `out`. A cut
        takes no columns, and whole groups where rows lie in pairs.
        """
        count, at = some.stop - some.first, 0
        first, stop = (0, some.groups * count) if cut is None else (cut.first, cut.stop)
        assert cut is None or cut.right is None
        size = info.nbytes // (some.groups * some.size)  # of a stored row
        while first < stop:
            group, within = divmod(first, count)
            taken = min(count - within, stop - first)
            start = info.start + (group * some.size + some.first + within) * size
            place = replace(info, start=start, stop=start + taken * size)
            mine = out[at : at + taken]
            self.copy(name, place, mine.view(-1), check_finite)
            if some.pairs:
                assert taken == count, f"{name}: rows {first} to {stop - 1} cut pairs"
                paired = mine.view(count, -1)[count - some.pairs :]
                paired.copy_(paired.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1))
            first, at = first + taken, at + taken

    def _not_finite(self, name: str, stored: torch.Tensor, held: torch.Tensor) -> BadCheckpoint:
        """The error for weights that are not finite once they are held."""
        beyond = "a value beyond the range of " + str(held.dtype).removeprefix("torch.")
        found = beyond if _all_finite(stored) else "NaN or infinity"
        return BadCheckpoint(
            f"{self.path}: tensor {shown(name)}: found {found}, expected finite weights"
        )

    def _release(self, start: int, stop: int) -> None:
        """Give the mapped pages of start..stop back; they stay in the page cache."""
        if hasattr(self.map, "madvise"):
            start -= start % mmap.PAGESIZE
            self.map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def close(self) -> None:
        self.map.close()


def _all_finite(values: torch.Tensor) -> bool:
    """Tell whether a flat tensor is free of NaN and infinity, without a temporary of its size.

    A finite sum proves it (27 GB/s on one core). An infinite sum may be mere overflow, so aminmax
    (12 GB/s) decides. isfinite().all() makes two temporaries and reaches 0.7 GB/s: it would add a
    third to the time of a load.
    """
    if values.numel() == 0 or math.isfinite(values.sum().item()):
        return True
    return all(math.isfinite(bound.item()) for bound in torch.aminmax(values))


def _read_index(folder: Path) -> dict[str, TensorInfo]:
    """List a sharded checkpoint's tensors; raise BadCheckpoint unless index and shards agree."""
    index = folder / INDEX
    names = read_object(inside(folder, INDEX), INDEX_LIMIT).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise BadCheckpoint(
            f"{index}: weight_map: found {shown(names)}, "
            f"expected an object that maps tensor names to file names"
        )
    for name, file in names.items():
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or len(file) > LONGEST_NAME
            or set(file) & set("/\\\0")
        ):
            raise BadCheckpoint(
                f"{index}: weight_map.{shown(name)}: found {shown(file)}, "
                f"expected a .safetensors file beside the index"
            )
    shards = sorted(set(names.values()))
    absent = [file for file in shards if not present(folder / file)]
    if absent:
        raise BadCheckpoint(
            f"{folder / absent[0]}: missing shard: found {len(shards) - len(absent)} of the "
            f"{len(shards)} files that {INDEX} names, expected all (partial download?)"
        )
    tensors: dict[str, TensorInfo] = {}
    for file in shards:
        for name, info in read_header(inside(folder, file)).items():
            if name in tensors:
                raise BadCheckpoint(
                    f"{info.file}: tensor {shown(name)}: "
                    f"found also in {tensors[name].file.name}, expected once"
                )
            tensors[name] = info
    for name, file in names.items():
        if name not in tensors or tensors[name].file.name != file:
            raise BadCheckpoint(
                f"{index}: weight_map.{shown(name)}: found {file}, which does not hold it; "
                f"expected the shard that does"
            )
    return tensors


def _no_weights(folder: Path) -> Exception:
    """Make the error for a folder without weights and index; it names what is there instead."""
    try:
        files = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        return BadCheckpoint(f"{folder}: cannot be listed: {error.strerror}")
    expected = f"expected {SINGLE} or {INDEX}"
    shards = [name for name in files if name.endswith(".safetensors")]
    if shards:
        return BadCheckpoint(
            f"{folder}: found {shards[0]} ({len(shards)} safetensors files) without an index, "
            f"{expected}"
        )
    pickles = [name for name in files if name.endswith(PICKLES)]
    if pickles:
        return UnsupportedCheckpoint(
            f"{folder}: found only {pickles[0]}: pickle checkpoints are not supported, "
            f"since opening one can run code; {expected}"
        )
    gguf = [name for name in files if name.endswith(".gguf")]
    if gguf:
        return UnsupportedCheckpoint(
            f"{folder}: found only {gguf[0]}: in folders not supported yet: gguf; name the file "
            f"itself ({folder / gguf[0]}), {expected}"
        )
    return BadCheckpoint(f"{folder}: found no weights, {expected}")
