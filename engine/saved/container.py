"""A checksummed safetensors file: written in one pass, read in bounded memory, never half there.

The header's metadata holds what the file says of itself as JSON (`facts`), the sha256 of every
tensor's bytes, and the sha256 of the header itself. Together with the size they cover every byte of
the file. A file is written beside its name under a temporary one, forced to the disk and renamed,
so that a process that is killed leaves the old file or none.

A file is read into buffers, not mapped: a mapping of a file that somebody shortens kills the
process, and the rows are copied into the bank in either case.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from engine.base.device import raw
from engine.base.errors import SavedFileError

FORMAT = "omnikv-session"
# every header begins so, behind its length
BEGINS = b'{"__metadata__":{"format":"omnikv-session"'
HEADER_LIMIT = 64 << 20  # bytes; a million tokens take 1 MB
BLANK = "0" * 64
NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
Plan = Sequence[tuple[str, torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: its type, its bytes start .. stop-1, and their sha256."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int
    digest: str


class Writer:
    """Writes the tensors of `plan`, in order, to `path`. Use as a context: leaving it without an
    error puts the file in place. Raises SavedFileError where the disk refuses.

    durable: force the bytes to the disk before the rename (a cache's entries need not).
    """

    def __init__(
        self, path: Path, plan: Plan, facts: Mapping[str, Any], durable: bool = True
    ) -> None:
        self.path, self._plan, self._facts, self._durable = path, list(plan), dict(facts), durable
        self._digests: list[str] = []
        self.digest = ""  # as Reader's, once it is written
        self._part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")

    def __enter__(self) -> Writer:
        remove_leftovers(self.path)
        try:
            self._file: BinaryIO = open(self._part, "xb", opener=_private)
            self._file.write(self._header([BLANK] * len(self._plan)))
        except OSError as error:
            self._give_up()
            raise refused(self.path, error) from error
        return self

    def write(self, name: str, data: torch.Tensor) -> None:
        """Write the next tensor, contiguous and on the CPU."""
        planned, dtype, shape = self._plan[len(self._digests)]
        assert (planned, dtype, shape) == (name, data.dtype, tuple(data.shape)), name
        bytes_ = raw(data)
        self._digests.append(hashlib.sha256(bytes_).hexdigest())
        try:
            self._file.write(bytes_)
        except OSError as error:
            raise refused(self.path, error) from error

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                assert len(self._digests) == len(self._plan), "every planned tensor is written"
                self._file.seek(0)
                self._file.write(self._header(self._digests))
                self._file.flush()
                if self._durable:
                    os.fsync(self._file.fileno())
                self._file.close()
                os.replace(self._part, self.path)
                if self._durable:
                    _sync_folder(self.path.parent)
        except OSError as error:
            raise refused(self.path, error) from error
        finally:
            self._give_up()

    def _give_up(self) -> None:
        """Close the file, and remove it if it was not renamed."""
        try:
            if hasattr(self, "_file"):
                self._file.close()
        except OSError:
            pass  # the buffer's rest did not fit on the disk; the file goes anyway
        self._part.unlink(missing_ok=True)

    def _header(self, digests: list[str]) -> bytes:
        blank = _header(self._plan, self._facts, digests, BLANK)
        self.digest = hashlib.sha256(blank).hexdigest()
        return _header(self._plan, self._facts, digests, self.digest)


def _header(plan: Plan, facts: Mapping[str, Any], digests: list[str], own: str) -> bytes:
    entries: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "header_sha256": own,
            "sha256": "".join(digests),
            "facts": json.dumps(facts),
        }
    }
    at = 0
    for name, dtype, shape in plan:
        size = _bytes(dtype, shape)
        entries[name] = {
            "dtype": NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)  # rows begin at whole cache lines
    return len(text).to_bytes(8, "little") + text


def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    size = dtype.itemsize
    for extent in shape:
        size *= extent
    return size


class Reader:
    """An open file whose header is valid. Raises SavedFileError, one line, if the file is no
    session, truncated or altered.

    facts: what the file says of itself. tensors: {name: Entry}. digest: of the header, and so of
    every byte. Threads may read tensors together.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.digest = path, ""
        # one reads at a time, in the order of the file, while others hash
        self._turn = threading.Lock()
        try:
            self._file = io.FileIO(str(path), opener=_nonblocking)
            self.size = os.fstat(self._file.fileno()).st_size
        except OSError as error:
            raise SavedFileError(f"{path}: cannot be read: {error.strerror}") from None
        try:
            self.facts, self.tensors, self._data = self._read_header()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def damaged(self, what: str) -> SavedFileError:
        """The error of a file that is not as it was written."""
        return SavedFileError(f"{self.path}: {what}; delete it and read the text again")

    def _foreign(self) -> SavedFileError:
        """The error of a file that nothing says is a session; it may be worth keeping."""
        return SavedFileError(
            f"{self.path}: found no saved session, expected a file that /save wrote"
        )

    def _read_header(self) -> tuple[dict[str, Any], dict[str, Entry], int]:
        head = self._bytes_at(0, 8) if self.size >= 8 else b""
        length = int.from_bytes(head, "little")
        if not head or length > HEADER_LIMIT:
            raise self._foreign()
        if self._bytes_at(8, min(len(BEGINS), length, self.size - 8)) != BEGINS:
            raise self._foreign()
        if length > self.size - 8:
            raise self.damaged(f"cut short: found {self.size} bytes, expected over {8 + length}")
        text = self._bytes_at(8, length)
        try:
            header = json.loads(text)
            meta = header.pop("__metadata__")
            if meta["format"] != FORMAT:
                raise KeyError("format")
            own, digests, facts = meta["header_sha256"], meta["sha256"], meta["facts"]
            blank = (head + text).replace(own.encode(), BLANK.encode(), 1)
            if len(own) != 64 or hashlib.sha256(blank).hexdigest() != own:
                raise self.damaged("its header is damaged (checksum)")
            tensors = _entries(header, digests, self.size - 8 - length)
            self.digest = own
            return json.loads(facts), tensors, 8 + length
        except SavedFileError:
            raise
        except EOFError:
            raise self.damaged("cut short or added to") from None
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            raise self.damaged("no saved session (or its header is damaged)") from None

    def read(self, name: str, out: torch.Tensor) -> None:
        """Read a tensor into `out`, contiguous and on the CPU, and check it."""
        entry = self.tensors.get(name)
        if entry is None or (entry.dtype, entry.shape) != (out.dtype, tuple(out.shape)):
            raise self.damaged(f"tensor {name}: not there, or of another type or shape")
        view = raw(out)
        self._fill(self._data + entry.start, view)
        if hashlib.sha256(view).hexdigest() != entry.digest:
            raise self.damaged(f"tensor {name} is damaged (checksum)")

    def load(self, name: str, most: int) -> torch.Tensor:
        """A new tensor of at most `most` bytes."""
        entry = self.tensors.get(name)
        if entry is None or entry.stop - entry.start > most:
            raise self.damaged(f"tensor {name}: not there, or larger than {most} bytes")
        out = torch.empty(entry.shape, dtype=entry.dtype)
        self.read(name, out)
        return out

    def _bytes_at(self, start: int, count: int) -> bytes:
        buffer = bytearray(count)
        self._fill(start, memoryview(buffer))
        return bytes(buffer)

    def _fill(self, start: int, view: memoryview) -> None:
        try:
            with self._turn:
                self._file.seek(start)
                done = 0
                while done < len(view):
                    got = self._file.readinto(view[done:])
                    if not got:
                        raise self.damaged("cut short while it was read")
                    done += got
        except OSError as error:
            raise SavedFileError(f"{self.path}: cannot be read: {error.strerror}") from None


def _entries(header: Mapping[str, Any], digests: str, size: int) -> dict[str, Entry]:
    """Check the header's tensors: known types, ranges without hole or overlap, all of the file.
    Raises EOFError where the ranges do not end with the file.
    """
    found, at = {}, 0
    for number, (name, entry) in enumerate(header.items()):
        dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
        if len(shape) > 8 or not all(type(extent) is int and extent >= 0 for extent in shape):
            raise ValueError("shape")
        start, stop = entry["data_offsets"]
        if start != at or stop - start != _bytes(dtype, shape):
            raise ValueError("data_offsets")
        at, digest = stop, digests[64 * number : 64 * number + 64]
        found[name] = Entry(dtype, shape, start, stop, digest)
    if at != size:
        raise EOFError
    return found


def remove_leftovers(path: Path) -> None:
    """Remove the partial files that ended processes left of `path`, or of any file of a folder."""
    folder, pattern = (path, ".*.part") if path.is_dir() else (path.parent, f".{path.name}.*.part")
    for part in folder.glob(pattern):
        pid = part.name.removesuffix(".part").rpartition(".")[2].partition("-")[0]
        if pid.isdigit() and int(pid) != os.getpid() and not runs(int(pid)):
            part.unlink(missing_ok=True)


def runs(pid: int) -> bool:
    """Whether a process of this number runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # another user's, or no such question on this system: leave it
    return True


def refused(path: Path, error: OSError) -> SavedFileError:
    """The error of a disk that took no more."""
    return SavedFileError(
        f"{path}: cannot be written: {error.strerror or error}; nothing was saved, and an earlier "
        "file is as it was"
    )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)  # it holds the user's documents


def _nonblocking(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait for ever


def _sync_folder(folder: Path) -> None:
    try:
        number = os.open(folder, os.O_RDONLY)
    except OSError:
        return  # Windows opens no folder; the rename is all there is
    try:
        os.fsync(number)
    except OSError:
        pass
    finally:
        os.close(number)
