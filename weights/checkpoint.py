"""A model folder's weights: found and checked without reading tensor data, then streamed one fused
tensor at a time.

`Checkpoint.open` reads headers only; `check` compares names, shapes and dtypes with what the model
wants, in both directions; `stream` maps the files, copies each tensor once, straight to its device
and dtype, and lets go of the mapped pages behind it. Host memory in use is the tensors handed out
plus CHUNK, whatever the size of the files.
"""

import math
import mmap
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from weights.errors import BadCheckpoint, UnsupportedCheckpoint
from weights.jsonfile import read_object, regular_size, shown
from weights.safetensors_file import FLOATS, TensorInfo, read_header

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
INDEX_LIMIT = 64 << 20  # bytes; that of a 70B model is 60 KB
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# bytes copied, checked and released at a time; 1 to 32 MB measured alike (bound by page faults)
CHUNK = 4 << 20


@dataclass(frozen=True)
class Target:
    """A tensor the model wants: its name there, and the stored parts (name, shape) that are joined
    along dim 0, in this order.
    """

    name: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class LoadProgress:
    """How far a load is: shards begun, of `shards`; stored bytes read, of `bytes_total`; seconds
    since the first.
    """

    shard: int
    shards: int
    bytes_done: int
    bytes_total: int
    seconds: float


class Checkpoint:
    """The tensors of one model folder. `tensors` maps names to TensorInfo, `total_bytes` is their
    stored size.
    """

    def __init__(self, folder: Path, tensors: dict[str, TensorInfo]):
        self.folder, self.tensors = folder, tensors
        self.total_bytes = sum(info.nbytes for info in tensors.values())
        self._sizes = {info.file: regular_size(info.file) for info in tensors.values()}

    @classmethod
    def open(cls, folder: str | Path) -> "Checkpoint":
        """Reads the index and every safetensors header of `folder`; no tensor data.

        Raises BadCheckpoint (damaged, incomplete or contradictory) or UnsupportedCheckpoint (pickle
        or GGUF only, unknown dtype).
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise BadCheckpoint(f"{folder}: found no folder, expected one in Hugging Face layout")
        if _present(folder / SINGLE):  # before the index, as transformers does
            return cls(folder, read_header(_inside(folder, SINGLE)))
        if _present(folder / INDEX):
            return cls(folder, _read_index(folder))
        raise _no_weights(folder)

    def check(
        self, targets: Iterable[Target], ignored: Callable[[str], bool] = lambda name: False
    ) -> None:
        """Compares the stored tensors with the wanted ones, strictly in both directions.

        `ignored(name)` says which stored tensors may be left unread. Raises UnsupportedCheckpoint
        for a dtype that is not one of float32, bfloat16, float16; BadCheckpoint for a missing
        tensor, a wrong shape, or a tensor that nobody wants.
        """
        wanted = {name: shape for target in targets for name, shape in target.parts}
        for name, info in self.tensors.items():
            if info.dtype not in FLOATS and not ignored(name):
                raise UnsupportedCheckpoint(
                    f"{info.file}: tensor {shown(name)}: quantised formats not supported yet: "
                    f"found dtype {info.dtype}, expected one of {', '.join(FLOATS)}"
                )
        missing = [name for name in wanted if name not in self.tensors]
        extra = [name for name in self.tensors if name not in wanted and not ignored(name)]
        if missing:
            shape, more = (
                list(wanted[missing[0]]),
                f" ({len(missing)} missing)" if len(missing) > 1 else "",
            )
            hint = (
                "; tie_word_embeddings is false in config.json"
                if missing[0] == "lm_head.weight"
                else ""
            )
            hint += f"; the first unknown one is {shown(extra[0])}" if extra else ""
            raise BadCheckpoint(
                f"{self.folder}: tensor {missing[0]}: found nothing, expected shape {shape}{more}{hint}"
            )
        for name, shape in wanted.items():
            info = self.tensors[name]
            if info.shape != tuple(shape):
                raise BadCheckpoint(
                    f"{info.file}: tensor {name}: found shape {list(info.shape)}, expected {list(shape)} by config.json"
                )
        if extra:
            more = f" ({len(extra)} such tensors)" if len(extra) > 1 else ""
            file = self.tensors[extra[0]].file
            raise BadCheckpoint(
                f"{file}: tensor {shown(extra[0])}: found, expected no such tensor by config.json{more}"
            )

    def stream(
        self,
        targets: Iterable[Target],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        check_finite: bool = True,
        progress: Callable[[LoadProgress], None] | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (target.name, tensor) in file order: contiguous, of `dtype`, on `device`. `check`
        has accepted `targets`.

        A tensor is the caller's alone: nothing here keeps it or shares memory with the files.
        `progress` is called after every stored tensor. With `check_finite`, NaN, infinity, or a
        value beyond the range of `dtype` raises BadCheckpoint.
        """
        targets = sorted(targets, key=lambda target: self._position(target.parts[0][0]))
        files = {self.tensors[name].file for target in targets for name, _ in target.parts}
        total = sum(self.tensors[name].nbytes for target in targets for name, _ in target.parts)
        read = _Progress(len(files), total, progress)
        maps: dict[Path, _Mapped] = {}
        try:
            # the tensor gets no name here: a suspended generator would keep it alive
            for target in targets:
                yield target.name, self._fused(target, device, dtype, check_finite, maps, read)
        finally:
            for mapped in maps.values():
                mapped.close()

    def _fused(
        self, target, device, dtype, check_finite, maps: dict, read: "_Progress"
    ) -> torch.Tensor:
        """One target's tensor, its parts below each other; opens maps as it needs them."""
        rows = sum(shape[0] for _, shape in target.parts)
        out = torch.empty((rows, *target.parts[0][1][1:]), dtype=dtype, device=device)
        row = 0
        for name, shape in target.parts:
            info = self.tensors[name]
            if info.file not in maps:
                maps[info.file] = _Mapped(info.file, self._sizes[info.file])
            maps[info.file].copy(name, info, out[row : row + shape[0]].view(-1), check_finite)
            row += shape[0]
            read.advance(info)
        return out

    def _position(self, name: str) -> tuple[Path, int]:
        info = self.tensors[name]
        return info.file, info.start


class _Progress:
    """Counts what was read and tells whoever asked."""

    def __init__(self, shards: int, total: int, report: Callable[[LoadProgress], None] | None):
        self.shards, self.total, self.report = shards, total, report
        self.files: set[Path] = set()
        self.done, self.begun = 0, time.monotonic()

    def advance(self, info: TensorInfo) -> None:
        self.files.add(info.file)
        self.done += info.nbytes
        if self.report:
            seconds = time.monotonic() - self.begun
            self.report(LoadProgress(len(self.files), self.shards, self.done, self.total, seconds))


class _Mapped:
    """One file, mapped read-only while it streams."""

    def __init__(self, path: Path, size: int):
        self.path = path
        with open(path, "rb") as file:
            found = os.fstat(file.fileno()).st_size
            if found != size:  # a map beyond a shrunken file would end in SIGBUS, not in a message
                raise BadCheckpoint(
                    f"{path}: changed while loading: found {found} bytes, expected {size}"
                )
            self.map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def copy(self, name: str, info: TensorInfo, out: torch.Tensor, check_finite: bool) -> None:
        """Converts the stored tensor into `out` (flat, any dtype and device), chunk by chunk,
        releasing the pages read.
        """
        source = DTYPES[info.dtype]
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
                stored = "a value beyond the range of " + str(out.dtype).removeprefix("torch.")
                found = stored if _all_finite(piece) else "NaN or infinity"
                raise BadCheckpoint(
                    f"{self.path}: tensor {shown(name)}: found {found}, expected finite weights"
                )
            del raw, piece  # a live view would keep the map from closing
            self._release(start, start + count * source.itemsize)

    def _release(self, start: int, stop: int) -> None:
        """Gives the mapped pages of start..stop back; they stay in the page cache."""
        if hasattr(self.map, "madvise"):
            start -= start % mmap.PAGESIZE
            self.map.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def close(self) -> None:
        self.map.close()


def _all_finite(values: torch.Tensor) -> bool:
    """Whether a flat tensor holds neither NaN nor infinity, without a temporary of its size.

    A finite sum proves it (27 GB/s on one core); a sum that is not may be overflow alone, and
    aminmax (12 GB/s) decides. isfinite().all() makes two temporaries and reaches 0.7 GB/s, a third
    of what a load takes otherwise.
    """
    if values.numel() == 0 or math.isfinite(values.sum().item()):
        return True
    return all(math.isfinite(bound.item()) for bound in torch.aminmax(values))


def _present(path: Path) -> bool:
    """Whether something bears this name: a dangling symlink counts, its message is clearer than "no
    weights".
    """
    return path.is_symlink() or path.exists()


def _inside(folder: Path, name: str) -> Path:
    """folder/name, after symlinks are seen to end in the folder itself or in the blobs of its hub
    cache entry.
    """
    path = folder / name
    try:
        real, root = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError):  # a loop raises RuntimeError before Python 3.13, OSError since
        regular_size(path)  # says which: missing, dangling, loop
        raise BadCheckpoint(f"{path}: cannot be resolved") from None
    roots = [root]
    # hub cache: models--ORG--NAME/snapshots/REVISION/file -> ../../blobs/HASH
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(allowed) for allowed in roots):
        raise BadCheckpoint(
            f"{path}: found a symlink to {shown(str(real), 200)}, expected a file inside the model's folder"
        )
    return path


def _read_index(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a sharded checkpoint, once index and shards agree."""
    index = folder / INDEX
    names = read_object(_inside(folder, INDEX), INDEX_LIMIT).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise BadCheckpoint(
            f"{index}: weight_map: found {shown(names)}, expected an object of tensor name to file name"
        )
    for name, file in names.items():
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or set(file) & set("/\\\0")
        ):
            raise BadCheckpoint(
                f"{index}: weight_map.{shown(name)}: found {shown(file)}, expected a .safetensors file beside the index"
            )
    shards = sorted(set(names.values()))
    absent = [file for file in shards if not _present(folder / file)]
    if absent:
        raise BadCheckpoint(
            f"{folder / absent[0]}: missing shard: found {len(shards) - len(absent)} of the {len(shards)} files "
            f"that {INDEX} names, expected all (partial download?)"
        )
    tensors: dict[str, TensorInfo] = {}
    for file in shards:
        for name, info in read_header(_inside(folder, file)).items():
            if name in tensors:
                raise BadCheckpoint(
                    f"{info.file}: tensor {shown(name)}: found also in {tensors[name].file.name}, expected once"
                )
            tensors[name] = info
    for name, file in names.items():
        if name not in tensors or tensors[name].file.name != file:
            raise BadCheckpoint(
                f"{index}: weight_map.{shown(name)}: found {file}, without that tensor; expected the one with it"
            )
    return tensors


def _no_weights(folder: Path) -> Exception:
    """The error for a folder without the two names that count: it says what is there instead."""
    try:
        files = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        return BadCheckpoint(f"{folder}: cannot be listed: {error.strerror}")
    expected = f"expected {SINGLE} or {INDEX}"
    shards = [name for name in files if name.endswith(".safetensors")]
    if shards:
        return BadCheckpoint(
            f"{folder}: found {shards[0]} ({len(shards)} safetensors files) without an index, {expected}"
        )
    pickles = [name for name in files if name.endswith(PICKLES)]
    if pickles:
        return UnsupportedCheckpoint(
            f"{folder}: found only {pickles[0]}, a pickle checkpoint (opening one can run code): not supported; "
            f"{expected}"
        )
    gguf = [name for name in files if name.endswith(".gguf")]
    if gguf:
        return UnsupportedCheckpoint(
            f"{folder}: found only {gguf[0]}: quantised formats not supported yet: gguf; {expected}"
        )
    return BadCheckpoint(f"{folder}: found no weights, {expected}")
