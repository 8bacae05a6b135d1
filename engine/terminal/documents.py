"""Documents from files and from standard input, for --file and /read: bounded before they are read,
made text of where they are none; and what a conversation keeps of them.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.base.errors import UsageError
from engine.text.boundary import decoded
from engine.text.papers.papers import Paper, bounded, paper

# bytes; a document of 16 MB fills contexts of some 4 million tokens, and its tokens need 1 GB
LONGEST = 16 << 20
LONGEST_CONTEXT = 1 << 24  # tokens: beyond any released model
BYTES_PER_TOKEN = 256  # no vocabulary's longest token has more
PACKED = 64 << 20  # bytes of a file that is more than its text, such as a PDF with pictures


STDIN = "standard input"


@dataclass(frozen=True)
class Given:
    """A document of the command line. name: what a person knows it by. note: what must be said of
    it; "" where it was text.
    """

    name: str
    text: str
    note: str = ""


@dataclass
class Document:
    """A document in the bank: characters start to stop-1 of the conversation's text."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Read:
    """The outcome of Conversation.read.

    tokens: read now. total: needed for the whole document; more than `tokens` after an
    interruption. characters: of the document that are in the bank.
    """

    tokens: int
    total: int
    characters: int


def longest_document(max_context: int) -> int:
    """Bytes of a document that a context of `max_context` tokens might still hold; of one without
    end, as many as LONGEST_CONTEXT may: it is read from one buffer.
    """
    return max(LONGEST, BYTES_PER_TOKEN * min(max_context, LONGEST_CONTEXT))


def read_documents(names: Sequence[str], longest: int, say: Callable[[str], None]) -> list[Given]:
    """Read the documents that -f names, in order; - is standard input.

    One given twice is read once, which `say` is told. Two files of one name keep their paths.
    Raises UsageError as read_document and read_stdin.
    """
    kept: dict[str, str] = {}  # by what they are
    for name in names:
        place = name if name == "-" else os.path.realpath(os.path.expanduser(name))
        if place in kept:
            say(f"{STDIN if name == '-' else name}: given twice, read once")
        else:
            kept[place] = name
    short = [Path(name).name for name in kept.values()]
    found = []
    for name in kept.values():
        read = read_stdin(longest) if name == "-" else read_document(name, longest)
        shown = Path(name).name if short.count(Path(name).name) == 1 else name
        found.append(Given(STDIN if name == "-" else shown, read.text, read.note))
    return found


def read_document(name: str, longest: int = LONGEST) -> Paper:
    """Read a document whose text has at most `longest` bytes: text in UTF-8, or what
    engine/text/papers/papers.py takes the text out of.

    Raises UsageError if it is no regular file, is longer, cannot be read or has no text.
    """
    path, data = _bytes(name, max(longest, PACKED))
    return paper(data, str(path), longest)


def read_text(name: str, longest: int = LONGEST) -> str:
    """Read a UTF-8 file of at most `longest` bytes unchanged, without its byte order mark.

    Raises UsageError if it is no regular file, is longer, cannot be read or is not UTF-8.
    """
    path, data = _bytes(name, longest)
    return decoded(data, str(path))


def _bytes(name: str, longest: int) -> tuple[Path, bytes]:
    try:
        path = Path(name.strip("'\"")).expanduser()
    except RuntimeError as error:  # ~name of somebody who has no home here
        raise UsageError(f"{name}: cannot be read: {error}") from error
    try:
        # without blocking: opening a pipe waits for its writer
        with open(path, "rb", opener=_without_waiting) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise _no_file(path, found.st_mode)
            data = file.read(longest + 1)
            if data is None:  # /proc/kmsg is a regular file that would wait
                raise OSError(errno.EAGAIN, "nothing can be read from it now")
    except (OSError, ValueError) as error:
        if isinstance(error, IsADirectoryError):
            raise _no_file(path, stat.S_IFDIR) from None
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path}: cannot be read: {reason}") from error
    return path, bounded(data, longest, str(path))


def read_stdin(longest: int = LONGEST) -> Paper:
    """Read all of standard input, as read_document. Raises UsageError."""
    if sys.stdin is None:
        raise UsageError("standard input: found it closed, expected a document")
    most = max(longest, PACKED)
    try:
        data = sys.stdin.buffer.read(most + 1)
    except OSError as error:
        raise UsageError(f"standard input: cannot be read: {error.strerror}") from error
    return paper(bounded(data, most, STDIN), STDIN, longest)


def _no_file(path: Path, mode: int) -> UsageError:
    if stat.S_ISDIR(mode):
        return UsageError(f"{path}: found a folder, expected a file; name each with its own -f")
    return UsageError(
        f"{path}: found a pipe or a device, expected a file; a pipe is read with "
        "-f - from standard input"
    )


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0))
