"""`python -m engine.chat`."""

import os
import signal
import sys
from types import FrameType

from engine.ranks.place import started


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once and say nothing: there is nothing to keep yet."""
    os._exit(128 + number)


def _keep_descriptors() -> None:
    """Open what a shell has closed (>&-), or the next file opened would become standard output."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number


def _keep_folder() -> None:
    """Leave a working folder that was deleted: the native libraries cannot be loaded from it."""
    try:
        os.getcwd()
    except OSError:
        os.chdir(os.sep)


def start() -> int:
    """Look at the flags, import the engine, which takes seconds, and run the chat; no Ctrl-C prints
    a traceback.
    """
    _keep_descriptors()
    _keep_folder()
    interruptible = signal.getsignal(signal.SIGINT) == signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, _leave)
    place = started(os.environ)
    if place is not None and place.rank:  # under torchrun: rank 0 alone reads the flags
        place.bind()
        from engine.ranks.drive.following import follow

        return follow(place)
    from engine.chat.flags import answer_at_once, parser, require_sense

    parser().require(require_sense, answer_at_once)
    from engine.chat.cli import main

    if interruptible:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main()
    finally:
        # what libraries do at exit is not worth a traceback either
        signal.signal(signal.SIGINT, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(start())
