"""Where compiled libraries are kept, and whether a file there is whole.

A library is code that runs in this process, so its folder must be one that only this user can write
to, as must every folder above it (a sticky folder such as /tmp will do). Each file ends in the
digest of what stands before it: a file that a power cut or a full disk has cut short would end the
process by SIGBUS when the loader touches a missing page.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

SEAL = b"omnikv sha256 of the bytes before:"
ROOM = (
    32 << 20
)  # bytes that compiling needs at most: objects, the compiler's own files, the library
KEPT = 8  # libraries that stay: those of other versions and compilers beside today's
OLD = 3600  # seconds after which nobody compiles in a folder any more
MAKING = ".making-"


def seal(path: Path, stamp: bytes = b"") -> None:
    """Append a stamp and the digest of a library and bring it to the disk. Raises OSError."""
    with path.open("r+b") as file:
        body = file.read() + stamp
        file.write(stamp + SEAL + _digest(body))
        file.flush()
        os.fsync(file.fileno())


def whole(path: Path, stamp: bytes = b"") -> bool:
    """Whether a library is there and ends in a stamp and the digest of the bytes before it."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    body, end = data[: -len(SEAL) - 32], data[-len(SEAL) - 32 :]
    return end == SEAL + _digest(body) and body.endswith(stamp)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def folders() -> Iterator[Path]:
    """Folders in which a library may lie, the best first: the user's cache, a folder of this user
    beside other temporary files, a folder of this process. A full or a read-only disk and one
    mounted without programs are passed over.
    """
    yield from kept()
    with tempfile.TemporaryDirectory(prefix="omnikv-") as folder:
        yield Path(folder)


def kept() -> Iterator[Path]:
    """The folders that outlive a process, made where they are missing."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # a relative path is to be ignored (XDG Base Directory Specification)
    cache = Path(base) if os.path.isabs(base) else Path(os.path.expanduser("~")) / ".cache"
    places = [cache / "omnikv" / "kernels"]
    places.append(Path(tempfile.gettempdir()) / f"omnikv-{os.getuid()}" / "kernels")
    for place in places:
        with suppress(OSError):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
            if _own(place.resolve()) and _runs_programs(place):
                yield place


def _own(place: Path) -> bool:
    """Whether nobody but this user and root can put a file there or exchange a folder above."""
    state = place.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        return False
    return all(_trusted(folder.stat()) for folder in place.parents)


def _trusted(state: os.stat_result) -> bool:
    if state.st_uid not in (0, os.getuid()):
        return False
    return not state.st_mode & 0o022 or bool(state.st_mode & stat.S_ISVTX)


def _runs_programs(place: Path) -> bool:
    return not os.statvfs(place).f_flag & getattr(os, "ST_NOEXEC", 0)


def has_room(place: Path) -> bool:
    """Whether a library can be compiled there."""
    return shutil.disk_usage(place).free >= ROOM


def bring_to_disk(place: Path) -> None:
    """Make a renamed file outlive a power cut."""
    handle = os.open(place, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(place: Path) -> None:
    """Delete what compilers that were killed left behind, and all but the KEPT libraries that were
    used last.
    """
    with suppress(OSError):
        for folder in place.glob(MAKING + "*"):
            if folder.stat().st_mtime < time.time() - OLD:
                shutil.rmtree(folder, ignore_errors=True)
        used = sorted(place.glob("kernels-*.so"), key=lambda path: -path.stat().st_mtime)
        for path in used[KEPT:]:
            path.unlink(missing_ok=True)
