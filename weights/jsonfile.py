"""Read the small JSON files of an untrusted model folder: regular files of bounded size, no key
twice.

`json` alone accepts each of these silently: a named pipe (blocks for ever), a 10 GB file, a key
given twice (the last one wins).
"""

import json
import os
import stat
from pathlib import Path
from typing import Any

from weights.errors import BadCheckpoint

# bytes; the largest config.json seen on the hub is under 1 MB, most are under 2 KB
CONFIG_LIMIT = 16 << 20


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


def read_json(path: Path, limit: int = CONFIG_LIMIT) -> Any:
    """Read the JSON value in `path`.

    Raises BadCheckpoint, naming the file, unless it holds one well-formed value of at most `limit`
    bytes.
    """
    size = regular_size(path)
    if size > limit:
        raise BadCheckpoint(f"{path}: found {size} bytes, expected at most {limit}")
    try:
        with open(path, "rb") as file:
            return json.loads(file.read(limit + 1), object_pairs_hook=no_duplicates)
    except OSError as error:
        raise BadCheckpoint(f"{path}: cannot be read: {error.strerror}") from None
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
