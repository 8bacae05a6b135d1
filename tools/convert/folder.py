"""Model folders that are whole or absent, and the record of what each was converted from.

A folder is written beside its place and renamed. Its record (conversion.json) holds the source's
sha256, the stored dtype, and size and sha256 of every file, so that a second conversion finds out
whether the first one is the same and still sound.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.base.errors import BadCheckpoint, EngineError, UsageError
from engine.base.figures import human
from weights.jsonfile import read_object

RECORD = "conversion.json"
FORMAT = 1
SPARE = 64 << 20  # bytes that a conversion leaves free on the disk
CHUNK = 1 << 20


def sha256(path: Path) -> str:
    """The sha256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def write_record(folder: Path, source: str, dtype: str) -> None:
    """Record the files of a folder. source: sha256 of the file that they were made of."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.iterdir())
    }
    record = {"format": FORMAT, "source_sha256": source, "dtype": dtype, "files": files}
    (folder / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a folder, if it has one and every recorded file has its recorded size."""
    try:
        record = read_object(folder / RECORD)
        files = record["files"]
        sound = record["format"] == FORMAT and all(
            Path(name).name == name and (folder / name).stat().st_size == entry["bytes"]
            for name, entry in files.items()
        )
    except (BadCheckpoint, OSError, KeyError, TypeError, AttributeError):
        return None
    return record if sound and files else None


def is_conversion(folder: Path, source: str, dtype: str) -> bool:
    """Whether a folder is the conversion of this source at this dtype, by its record and sizes."""
    record = read_record(folder)
    return record is not None and (record.get("source_sha256"), record.get("dtype")) == (
        source,
        dtype,
    )


def same_conversion(folder: Path, source: str, dtype: str) -> bool:
    """False if nothing is at `folder`, True if it is this conversion; reads every file.

    Raises UsageError if something else is there, BadCheckpoint if a file of it has changed.
    """
    if not folder.exists() and not folder.is_symlink():
        return False
    if not is_conversion(folder, source, dtype):
        raise UsageError(
            f"{folder}: exists and is not this conversion (sha256 {source[:12]}, {dtype}); "
            "delete it or name another folder"
        )
    for name, entry in (read_record(folder) or {})["files"].items():
        if sha256(folder / name) != entry["sha256"]:
            raise BadCheckpoint(
                f"{folder / name}: changed since it was converted (another sha256); "
                f"delete {folder} and convert again"
            )
    return True


def require_room(folder: Path, needed: int) -> None:
    """Raise EngineError unless the disk below `folder` has `needed` bytes, and SPARE, free."""
    below = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(below).free
    if free < needed + SPARE:
        raise EngineError(
            f"{folder}: needs {human(needed + SPARE)} on the disk, {human(free)} are free; "
            "make room or name a folder on another disk"
        )


@contextmanager
def whole_or_absent(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, renamed to it at the end; removed if the block raises."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise EngineError(f"{folder}: cannot be written: {error.strerror}") from None
    try:
        yield beside
        beside.chmod(0o777 & ~_umask())  # mkdtemp lets only its maker in
        os.rename(beside, folder)
    except OSError as error:
        raise EngineError(f"{folder}: cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0o22)
    os.umask(mask)
    return mask
