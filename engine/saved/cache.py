"""Blocks of rows on disk, found again by content: what was read once need not be read again, after
a restart or by another process.

A block is 256 tokens. Its name is the sha256 of its parent's name and its token ids; the first
parent is the model and the method. So a name says everything that the rows depend on, and two
processes that write the same name write the same rows. A block that is damaged is removed and its
tokens are read again. Only whole blocks are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.errors import SavedFileError, SettingError
from engine.guard import exclusive
from engine.saved.container import Reader, Writer, remove_leftovers
from engine.saved.model_key import model_key
from engine.saved.rows import PIECE, piece_shape, read_ahead, read_piece, write_piece
from engine.saved.session_file import Progress

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.methods.base import Method
    from engine.session import Session

SUFFIX = ".block"


def follows_from_tokens(session: Session) -> bool:
    """Whether a session's rows follow from its tokens alone: not with a store of the method's own,
    nor where the rotation depends on the whole prompt's length, nor where sliding-window layers
    forget rows.
    """
    kept = session.runtime.needs.history == "bank" and not getattr(
        session.method, "official", False
    )
    config = session.llm.config
    return kept and config.rope.kind != "dynamic" and not config.local_layers


def root_of(llm: LLM, method: Method) -> str:
    """The parent of every first block of a model under a method."""
    root = {**model_key(llm), "method": repr(method)}
    return hashlib.sha256(json.dumps(root, sort_keys=True).encode()).hexdigest()


def names_of(llm: LLM, method: Method, ids: Sequence[int]) -> list[str]:
    """Names of the whole blocks of `ids`, in order."""
    name, names = root_of(llm, method), []
    for first in range(0, len(ids) - PIECE + 1, PIECE):
        tokens = array("q", ids[first : first + PIECE]).tobytes()
        name = hashlib.sha256(name.encode() + tokens).hexdigest()
        names.append(name)
    return names


class BlockCache:
    """The blocks below `folder`, at most `limit` bytes of them (least recently used go first).

    announce: called with a line where an entry cannot be written or read; work goes on without it.
    """

    def __init__(
        self,
        folder: str | Path,
        limit: int = 50 * 10**9,
        announce: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.folder, self.limit, self.announce = Path(folder), limit, announce
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise SettingError(
                f"cache: {self.folder}: found {error.strerror}, expected a folder to write to"
            ) from error
        for place in self.folder.iterdir():
            if place.is_dir():
                remove_leftovers(place)

    # ---------------------------------------------------------------- names

    def _names(self, session: Session, ids: Sequence[int]) -> list[str]:
        return names_of(session.llm, session.method, ids)

    def path(self, name: str) -> Path:
        """Where a block lies."""
        return self.folder / name[:2] / (name + SUFFIX)

    # ---------------------------------------------------------------- reading

    def fill(self, session: Session, ids: Sequence[int], progress: Progress | None = None) -> int:
        """Extend a session, which holds the first tokens of `ids`, with the blocks that are here,
        and return how many tokens it holds then. The last token of `ids` is left to be read.
        """
        held, found = len(session), 0
        if not follows_from_tokens(session) or session.ids != list(ids[:held]):
            return held
        names = self._names(session, ids[: len(ids) - 1])
        while found < len(names) and self.path(names[found]).is_file():
            found += 1
        done, begun = held, held // PIECE
        blocks = [(number * PIECE, (number + 1) * PIECE) for number in range(begun, found)]

        def read(number: int, piece: torch.Tensor) -> None:
            first, stop = blocks[number]
            self._read(names[begun + number], ids[first:stop], piece)

        with exclusive(session.llm):
            try:
                with read_ahead(session.bank, blocks, read) as pieces:
                    for first, stop in blocks:
                        piece = self._found(pieces, names[first // PIECE])
                        if piece is None:
                            break
                        write_piece(session.bank, piece, first, max(0, done - first))
                        done = stop
                        if progress is not None:
                            progress(done, len(ids))
            except BaseException:
                session.bank.rewind(held, broken=True)
                raise
        if done > held:
            session.adopt(ids[:done])
            self._touch(names[:found])
        return done

    def _read(self, name: str, tokens: Sequence[int], piece: torch.Tensor) -> None:
        """Read the rows of a block, which must be of these tokens. Raises SavedFileError."""
        stored = torch.empty(PIECE, dtype=torch.int64)
        with Reader(self.path(name)) as reader:
            reader.read("ids", stored)
            if reader.facts != {"block": name} or stored.tolist() != list(tokens):
                raise reader.damaged("it is another block than its name says")
            reader.read("rows", piece)

    def _found(self, pieces: Iterator[torch.Tensor], name: str) -> torch.Tensor | None:
        """The next piece, of the block of this name; None where that is gone, or was damaged and is
        removed.
        """
        path = self.path(name)
        try:
            return next(pieces)
        except SavedFileError as error:
            if path.is_file():
                self.announce(f"cache: {error}")
                _remove(path)
            return None

    def _touch(self, names: Sequence[str]) -> None:
        """Mark blocks as used, the first one last: a chain loses its end before its beginning."""
        now = time.time_ns()
        for depth, name in enumerate(names):
            try:
                # the system's own clock ticks too seldom to order them
                os.utime(self.path(name), ns=(now - depth, now - depth))
            except OSError:
                pass  # another process removed it

    # ---------------------------------------------------------------- writing

    def store(self, session: Session) -> int:
        """Write the whole blocks of a session that are not here yet; how many were written."""
        return sum(1 for _ in self.storing(session))

    def storing(self, session: Session) -> Iterator[None]:
        """As `store`, one block after the other."""
        if not follows_from_tokens(session):
            return
        written, names = 0, self._names(session, session.ids)
        for number, name in enumerate(names):
            path = self.path(name)
            if path.is_file():
                continue
            with exclusive(session.llm):
                done = self._write(session, path, name, number * PIECE)
            if not done:
                break
            written += 1
            yield
        if written:
            self._touch(names)
            self._shrink()

    def _write(self, session: Session, path: Path, name: str, first: int) -> bool:
        bank = session.bank
        plan = [
            ("ids", torch.int64, (PIECE,)),
            ("rows", bank.dtype, piece_shape(bank, PIECE)),
        ]
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            with Writer(path, plan, {"block": name}, durable=False) as writer:
                writer.write("ids", torch.tensor(session.ids[first : first + PIECE]))
                writer.write("rows", read_piece(bank, first, first + PIECE))
        except (SavedFileError, OSError) as error:
            self.announce(f"cache: {error}")
            return False
        return True

    def _shrink(self) -> None:
        """Remove the least recently used blocks until the rest fits into the limit."""
        found = []
        for path in self.folder.glob(f"*/*{SUFFIX}"):
            try:
                status = path.stat()
            except OSError:
                continue  # another process removed it
            found.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.limit:
                break
            _remove(path)
            total -= size


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass  # a folder that others own: the entry stays
