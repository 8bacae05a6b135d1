"""Text from files and from standard input, for --file and /read."""

import sys
from pathlib import Path

from engine.errors import UsageError


def read_text(name: str) -> str:
    """Read a UTF-8 file unchanged, without its byte order mark.

    Raises UsageError if it cannot be read or is not UTF-8.
    """
    path = Path(name.strip("'\"")).expanduser()
    try:
        return decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error


def read_stdin() -> str:
    """Read all of standard input as UTF-8. Raises UsageError if it is not."""
    return decoded(sys.stdin.buffer.read(), "standard input")


def decoded(data: bytes, name: str) -> str:
    """Decode UTF-8 bytes. A document is never changed silently.

    Raises UsageError that names the first byte that is not UTF-8, its position and the remedy.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name}: found byte 0x{data[error.start]:02x} at {error.start}, expected UTF-8 text; "
            f"convert it first (iconv -f latin1 -t utf-8)"
        ) from error
