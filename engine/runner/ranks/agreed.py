"""Work that each rank does by itself, with files of its own: all of it is done, or none. And what
they have found there, as one number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from engine.base.errors import RankLost, SavedFileError
from engine.base.figures import first_line
from engine.load.loaded import Loaded


@contextmanager
def agreed(loaded: Loaded) -> Iterator[None]:
    """A context that all ranks of a model leave together. Where one of them raises inside, so do
    the others: SavedFileError with its line. Nothing inside may wait for other ranks. Of a model of
    one process it is no context at all.
    """
    if loaded.peers is None:
        yield
        return
    own: BaseException | None = None
    try:
        yield
    except RankLost:
        raise
    except BaseException as error:
        own = error
    said = "" if own is None else first_line(own) or type(own).__name__
    lines = loaded.peers.texts(said)
    if own is not None:
        raise own
    for line in filter(None, lines):
        raise SavedFileError(line)


def least(loaded: Loaded, number: int) -> int:
    """The least of the ranks' numbers; of one process, its own."""
    peers = loaded.peers
    return number if peers is None else min(own for (own,) in peers.said(number))
