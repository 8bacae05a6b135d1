"""The boundary for text: what comes in is valid Unicode or is refused, what goes to a terminal
cannot rule it.

Every text meets these four functions and no other: documents and piped lines (`decoded`), prompts,
messages, flags and what templates write (`valid`), what is printed for people (`printable`,
`one_line`). Files and JSON keep their bytes.
"""

from __future__ import annotations

import re

from engine.base.errors import UsageError

ERROR_CHARACTERS = 300  # of an error's line; the middle of a longer one is left out
LEFT_OUT = " ... "
# C0 but for the tab and the line's end, DEL, C1, and halves of surrogate pairs
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
REPLACEMENT = "\ufffd"


def decoded(data: bytes, name: str) -> str:
    """Decode UTF-8 bytes, without their byte order mark. A document is never changed silently.

    Raises UsageError that names the first byte that is not UTF-8, its position and the remedy.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{name}: found byte 0x{data[error.start]:02x} at {error.start}, expected UTF-8 text; "
            f"convert it first (iconv -f latin1 -t utf-8)"
        ) from error


def valid(text: str, name: str) -> str:
    """Return `text`; raise UsageError, naming the place, where it is not Unicode.

    A str may hold halves of surrogate pairs: what Python makes of bytes of the command line and of
    a pipe that are no UTF-8, or what JSON's \\ud800 spells. No tokenizer takes them.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        # surrogateescape (PEP 383) hides a byte that is no UTF-8 in U+DC80 to U+DCFF
        found = f"byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"U+{code:04X}"
        raise UsageError(
            f"{name}: found {found} at character {error.start}, expected Unicode text (UTF-8)"
        ) from None
    return text


def printable(text: str) -> str:
    """Replace control characters, with which a document or a model could write over the screen,
    set its title or answer for the user.
    """
    return CONTROLS.sub(REPLACEMENT, text)


def one_line(message: str) -> str:
    """Return a message as one printable line of at most ERROR_CHARACTERS characters."""
    line = printable(" ".join(message.split("\n")).strip())
    if len(line) <= ERROR_CHARACTERS:
        return line
    # the start names the thing, the end the remedy
    end = ERROR_CHARACTERS // 4
    return line[: ERROR_CHARACTERS - end - len(LEFT_OUT)] + LEFT_OUT + line[-end:]
