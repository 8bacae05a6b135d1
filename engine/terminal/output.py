"""Standard output, to which answers go. It may be closed or full, or its reader may have left."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

from engine.base.errors import OutputFailed
from engine.text.boundary import printable


def require_output() -> None:
    """Raise OutputFailed where standard output is closed: better before a model is loaded."""
    if sys.stdout is None:
        raise OutputFailed("standard output: found it closed, expected a place for answers")


def emit(text: str, out: TextIO | None = None) -> None:
    """Write text at once. A terminal gets it without control characters.

    out: standard output by default. Raises OutputFailed where it cannot be written, and
    BrokenPipeError where its reader has left.
    """
    stream = out or sys.stdout
    if stream is None:
        require_output()
        return
    try:
        stream.write(printable(text) if stream.isatty() else text)
        stream.flush()
    except BrokenPipeError:
        raise
    except (OSError, ValueError) as error:  # ValueError: closed
        reason = getattr(error, "strerror", None) or error
        raise OutputFailed(f"standard output: cannot be written: {reason}") from error


def abandon_output() -> None:
    """Drop what standard output could not take, so that nothing is said about it at exit."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
