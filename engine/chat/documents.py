"""Text from files and from standard input, for --file and /read: bounded before it is read."""

import errno
import os
import stat
import sys
from pathlib import Path

from engine.errors import UsageError
from engine.text.boundary import decoded

# bytes; a document of 16 MB fills contexts of some 4 million tokens, and its tokens need 1 GB
LONGEST = 16 << 20
BYTES_PER_TOKEN = 256  # no vocabulary's longest token has more


def longest_document(max_context: int) -> int:
    """Bytes of a document that a context of `max_context` tokens might still hold."""
    return max(LONGEST, BYTES_PER_TOKEN * max_context)


def read_text(name: str, longest: int = LONGEST) -> str:
    """Read a UTF-8 file of at most `longest` bytes unchanged, without its byte order mark.

    Raises UsageError if it is no regular file, is longer, cannot be read or is not UTF-8.
    """
    try:
        path = Path(name.strip("'\"")).expanduser()
    except RuntimeError as error:  # ~name of somebody who has no home here
        raise UsageError(f"{name}: cannot be read: {error}") from error
    try:
        # without blocking: opening a pipe waits for its writer
        with open(path, "rb", opener=_without_waiting) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise UsageError(
                    f"{path}: found {_kind(found.st_mode)}, expected a file; a pipe is read with "
                    "-f - from standard input"
                )
            data = file.read(longest + 1)
            if data is None:  # /proc/kmsg is a regular file that would wait
                raise OSError(errno.EAGAIN, "nothing can be read from it now")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: cannot be read: {reason}") from error
    return decoded(_bounded(data, longest, str(path)), str(path))


def read_stdin(longest: int = LONGEST) -> str:
    """Read all of standard input as UTF-8. Raises UsageError if it is longer or no UTF-8."""
    if sys.stdin is None:
        raise UsageError("standard input: found it closed, expected a document")
    try:
        data = sys.stdin.buffer.read(longest + 1)
    except OSError as error:
        raise UsageError(f"standard input: cannot be read: {error.strerror}") from error
    return decoded(_bounded(data, longest, "standard input"), "standard input")


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))


def _kind(mode: int) -> str:
    return "a folder" if stat.S_ISDIR(mode) else "a pipe or a device"


def _bounded(data: bytes, longest: int, name: str) -> bytes:
    if len(data) > longest:
        raise UsageError(
            f"{name}: found more than {longest:,} bytes, expected at most that many, which is more "
            "than the context can hold"
        )
    return data
