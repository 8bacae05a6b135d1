"""Read the text files of an untrusted model folder: regular files inside it, of bounded size, in
UTF-8; JSON of bounded parts and no key twice.

`open` and `json` alone accept each of these silently: a named pipe (blocks for ever), a 10 GB file,
a link to somebody else's file, a key given twice (the last one wins), 100 MB of "[],[]," (3 GB of
lists).
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from weights.errors import BadCheckpoint

# bytes; the largest config.json seen on the hub is under 1 MB, most are under 2 KB
CONFIG_LIMIT = 16 << 20
INDEX_LIMIT = 64 << 20  # bytes; the index of a 70B model has 60 KB
TOKENIZER_LIMIT = 64 << 20  # bytes; the largest tokenizer.json on the hub has 33 MB (Gemma 3)
# commas and brackets of a JSON text; each costs up to 200 bytes as Python objects. The header of a
# model of 100,000 tensors has 800,000.
MOST_PARTS = 2_000_000


class DuplicateKey(ValueError):
    """A JSON object gives one key twice.

    A ValueError, so that callers of json catch one kind of failure.
    """


def shown(value: object, limit: int = 60) -> str:
    """Show `value` in a one-line message: printable, at most `limit` characters."""
    if value is None:
        return "nothing"
    try:
        text = value if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # an integer of over 4300 digits; nested without end
        text = f"a huge {type(value).__name__}"
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def no_duplicates(pairs: list[tuple[str, object]]) -> dict:
    """Make a dict of a JSON object (json's `object_pairs_hook`); raise DuplicateKey."""
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DuplicateKey(f"key {shown(key)} is given twice")
            seen.add(key)
    return found


def regular_size(path: Path) -> int:
    """Size of a regular file in bytes; follows symlinks.

    Raises BadCheckpoint if the file is missing or unreadable, or is a symlink loop, a folder, a
    pipe or a device.
    """
    try:
        info = os.stat(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise BadCheckpoint(f"{path}: found a dangling symlink, expected a file") from None
        raise BadCheckpoint(f"{path}: the file is missing") from None
    except OSError as error:  # ELOOP, EACCES, ENAMETOOLONG, ENOTDIR
        raise BadCheckpoint(f"{path}: cannot be opened: {error.strerror}") from None
    if not stat.S_ISREG(info.st_mode):
        kind = "a folder" if stat.S_ISDIR(info.st_mode) else "a pipe or device, no regular file"
        raise BadCheckpoint(f"{path}: found {kind}, expected a file")
    return info.st_size


def present(path: Path) -> bool:
    """Tell whether anything has this name; a dangling symlink counts, as its own error is clearer
    than none.
    """
    return os.path.lexists(path)


def inside(folder: Path, name: str) -> Path:
    """Join folder/name and require that symlinks end in the folder or in the blobs of its hub cache
    entry; raises BadCheckpoint.
    """
    path = folder / name
    try:
        real, root = path.resolve(strict=True), folder.resolve(strict=True)
    except (OSError, RuntimeError):  # a loop raises RuntimeError before Python 3.13, OSError since
        regular_size(path)  # raises the clearer error: missing, dangling, loop
        raise BadCheckpoint(f"{path}: cannot be resolved") from None
    roots = [root]
    # hub cache: models--ORG--NAME/snapshots/REVISION/file -> ../../blobs/HASH
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    if not any(real.is_relative_to(allowed) for allowed in roots):
        raise BadCheckpoint(
            f"{path}: found a symlink to {shown(str(real), 200)}, "
            f"expected a file inside the model's folder"
        )
    return path


def read_bytes(path: Path, limit: int = CONFIG_LIMIT) -> bytes:
    """Read a regular file of at most `limit` bytes; raises BadCheckpoint, naming the file."""
    size = regular_size(path)
    if size > limit:
        raise BadCheckpoint(f"{path}: found {size} bytes, expected at most {limit}")
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise BadCheckpoint(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > limit:  # it grew meanwhile
        raise BadCheckpoint(f"{path}: found over {limit} bytes, expected at most {limit}")
    return data


def read_text(path: Path, limit: int = CONFIG_LIMIT) -> str:
    """Read a UTF-8 text file; raises as `read_bytes`, and names a byte that is no UTF-8."""
    data = read_bytes(path, limit)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadCheckpoint(
            f"{path}: found byte 0x{data[error.start]:02x} at {error.start}, expected UTF-8 text"
        ) from None


def parts_of(data: bytes) -> int:
    """Commas and brackets of a JSON text: an upper bound of its values."""
    return sum(map(data.count, (b",", b"[", b"{")))


def parse(data: bytes) -> Any:
    """The value of a JSON text of at most MOST_PARTS parts, no key twice.

    Raises ValueError (bad JSON, not UTF-8, too many parts, DuplicateKey) and RecursionError.
    """
    if (parts := parts_of(data)) > MOST_PARTS:
        raise ValueError(f"found {parts} commas and brackets, expected at most {MOST_PARTS}")
    return json.loads(data, object_pairs_hook=no_duplicates)


def read_json(path: Path, limit: int = CONFIG_LIMIT) -> Any:
    """Read the JSON value in `path`.

    Raises BadCheckpoint, naming the file, unless it holds one well-formed value of at most `limit`
    bytes.
    """
    data = read_bytes(path, limit)
    try:
        return parse(data)
    # bad JSON or UTF-8, DuplicateKey, over-long integers
    except (ValueError, RecursionError) as error:
        reason = (
            "nested too deeply" if isinstance(error, RecursionError) else shown(str(error), 120)
        )
        raise BadCheckpoint(f"{path}: not valid JSON: {reason}") from None


def read_object(path: Path, limit: int = CONFIG_LIMIT) -> dict:
    """Read the JSON object in `path`; raises as `read_json`, and where it holds another value."""
    data = read_json(path, limit)
    if not isinstance(data, dict):
        raise BadCheckpoint(f"{path}: found a JSON {type(data).__name__}, expected an object")
    return data
