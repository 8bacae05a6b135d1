"""Blocks of rows on disk, found by content: a text that was read once is not read again, after a
restart or by another process.

A block is 256 tokens. Its name is the sha256 of its parent's name, its token ids and how its rows
came about (engine/bank/row_origins.py); the first parent is the model. So a name says everything
that the rows depend on and nothing else. Rows of full attention have one name under every method
and budget; those of a prompt that was read otherwise have their own, or, like those of a sparse
answer, none, and are not kept. Two processes that write the same name write the same rows, up to
the rounding of other chunks, threads and devices. A block that is damaged is removed and its tokens
are read again. Only whole blocks are kept.

Of a model that several ranks hold, each keeps blocks of its own rows. The model that a first parent
stands for is then a rank's share of it, so their names hold the split, and a prompt goes on from
the tokens that all ranks have found.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.bank.row_origins import RowOrigins, Span
from engine.base.errors import SavedFileError, SettingError
from engine.load.loaded import Loaded
from engine.load.planner import Planner
from engine.methods.base import Method
from engine.runner.prefill import adopt
from engine.runner.ranks.agreed import agreed, least
from engine.runner.ranks.led import led
from engine.runner.rollback import exclusive
from engine.runner.state import SessionState
from engine.saved.container import Reader, Writer, remove_leftovers
from engine.saved.model_key import model_key
from engine.saved.rows import PIECE, piece_shape, read_ahead, read_piece, write_piece
from engine.saved.session_file import Progress

SUFFIX = ".block"
# how rows first .. stop-1 of a prompt come about: (prompt's begin, first, stop, prompt's end)
Origins = Callable[[int, int, int, float], Sequence[Span]]


def unfit(planner: Planner) -> str:
    """Return the reason why blocks cannot serve a session of this model; "" if they can."""
    config = planner.config
    if config.local_layers:
        return f"the sliding-window layers of this model ({config.family}) forget rows"
    if config.recurrent is not None:
        return (
            f"the recurrent layers of this model ({config.family}) have a state that no row gives"
        )
    if config.rope.kind == "dynamic":
        return "the rope of this model (dynamic) depends on the whole prompt's length"
    return ""


def root_of(loaded: Loaded) -> str:
    """The parent of every first block of a model."""
    root = {**model_key(loaded), "forms": loaded.weights_forms}
    return hashlib.sha256(json.dumps(root, sort_keys=True).encode()).hexdigest()


def name_of(parent: str, tokens: bytes, origin: str) -> str:
    """The name of a block: tokens as int64, and RowOrigins.text of its rows."""
    return hashlib.sha256(parent.encode() + tokens + origin.encode()).hexdigest()


def names_of(loaded: Loaded, planner: Planner, method: Method, ids: Sequence[int]) -> list[str]:
    """Names of the whole blocks that reading `ids` under a method leaves, in order."""
    method, plan = planner.resolve_method(method)
    origins = RowOrigins(_planned(partial(method.prompt_origins, plan), planner.chunk, 0, len(ids)))
    return [block.name for block in _blocks(loaded, ids, origins)]


def _planned(origins: Origins, chunk: int, first: int, stop: int) -> list[Span]:
    """How the rows of a prompt at positions first .. stop-1 will come about."""
    found: list[Span] = []
    for at in range(first, stop, chunk):
        found += origins(first, at, min(stop, at + chunk), stop)
    return found


class Block(NamedTuple):
    """A block's name, and the fields that it is computed from."""

    name: str
    parent: str
    origin: str


def _blocks(loaded: Loaded, ids: Sequence[int], origins: RowOrigins) -> list[Block]:
    """The whole blocks of `ids`, up to the first whose rows have no name."""
    parent, found = root_of(loaded), []
    for first in range(0, len(ids) - PIECE + 1, PIECE):
        origin = origins.text(first, first + PIECE)
        if origin is None:
            break
        tokens = array("q", ids[first : first + PIECE]).tobytes()
        found.append(Block(name_of(parent, tokens, origin), parent, origin))
        parent = found[-1].name
    return found


class _Wanted:
    """The blocks that a session of the first tokens of `ids` would write if it read the rest.

    origins: of all of `ids`. blocks: those that may come in place of reading; none where the
    session keeps state that no block brings, or where its method reads no second prompt.
    """

    def __init__(self, session: SessionState, ids: Sequence[int]) -> None:
        self.held, self.total, self.chunk = len(session), len(ids), session.planner.chunk
        self.ids = ids
        self._session, self.blocks, needs = session, list[Block](), session.runtime.needs
        self.origins = RowOrigins(session.origins.of(0, self.held))
        self.origins.add(self.held, self._planned(self.held))
        # queries that a selection reads are computed again by full attention
        least = max(1, needs.window, needs.prompt_window) if needs.own_prompts else 1
        if not unfit(session.planner) and needs.history == "bank":
            self.blocks = _blocks(session.loaded, ids[: max(0, self.total - least)], self.origins)

    def _planned(self, first: int) -> list[Span]:
        session = self._session
        origins = partial(session.method.prompt_origins, session.plan)
        return _planned(origins, self.chunk, first, self.total)

    def goes_on_from(self, found: int) -> int:
        """The most tokens, whole blocks and at most `found`, after which reading the rest as a
        prompt of its own writes what reading all at once would.
        """
        while found > self.held:
            rest, alone = self.origins.of(found, self.total), self._planned(found)
            # where chunks end decides rows that have no name
            named = all(origin is not None for _, origin in rest)
            same = RowOrigins(alone).of(found, self.total) == rest
            if same and (named or (found - self.held) % self.chunk == 0) and self._legal(found):
                break
            found -= PIECE
        return max(found, self.held)

    def _legal(self, found: int) -> bool:
        try:
            self._session.method.validate_prompt(found, self.total)
        except SettingError:
            return False
        return True


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

    def note(self, planner: Planner) -> str:
        """Return the line about this cache beside a model; "" if there is none."""
        why = unfit(planner)
        if not why and getattr(planner.method, "forget", False):
            why = f"{planner.method.name} frees rows (with forget=False it keeps them all)"
        return f"--cache {self.folder}: nothing is kept or found, because {why}" if why else ""

    def __reduce__(self) -> tuple[Any, ...]:
        """The same folder and limit for another process, which announces nothing."""
        return _same, (self.folder.absolute(), self.limit)

    def path(self, name: str) -> Path:
        """Return the path of a block."""
        return self.folder / name[:2] / (name + SUFFIX)

    # ---------------------------------------------------------------- reading

    def fill(
        self, session: SessionState, ids: Sequence[int], progress: Progress | None = None
    ) -> int:
        """Extend a session, which holds the first tokens of `ids`, with the blocks that are here
        and hold what reading the rest of `ids` would write; return how many tokens it holds then.
        The last token of `ids` is left to be read.
        """
        return filled(session, self, list(ids), progress)

    def _filled(self, session: SessionState, ids: list[int], progress: Progress | None) -> int:
        held, loaded = len(session), session.loaded
        if session.ids != ids[:held]:
            return held
        wanted = _Wanted(session, ids)
        found = held // PIECE
        while found < len(wanted.blocks) and self.path(wanted.blocks[found].name).is_file():
            found += 1
        stop, begun = wanted.goes_on_from(least(loaded, found) * PIECE), held // PIECE
        starts = range(begun * PIECE, stop, PIECE) if stop > held else ()
        spans = [(first, first + PIECE) for first in starts]
        with exclusive(loaded):
            try:
                with agreed(loaded):
                    done = self._brought(session, wanted, spans, progress)
                done = wanted.goes_on_from(least(loaded, done))
                if done < stop:  # a block was damaged
                    session.bank.rewind(done)
            except BaseException:
                session.bank.rewind(held, broken=True)
                raise
        if done > held:
            adopt(session, ids[:done], wanted.origins.of(0, done))
            self._touch([block.name for block in wanted.blocks[: done // PIECE]])
        return done

    def _brought(
        self,
        session: SessionState,
        wanted: _Wanted,
        spans: list[tuple[int, int]],
        progress: Progress | None,
    ) -> int:
        """Bring the rows of these spans to a session's bank, up to one that is damaged or gone; how
        many tokens it holds then.
        """
        ids, begun, done = wanted.ids, wanted.held // PIECE, wanted.held

        def read(number: int, piece: torch.Tensor) -> None:
            first, stop = spans[number]
            self._read(wanted.blocks[begun + number], ids[first:stop], piece)

        here = session.bank.here
        held = [(here(first)[1], here(stop)[1]) for first, stop in spans]
        with read_ahead(here(0)[0], held, read) as pieces:
            for (first, stop), (row, _) in zip(spans, held):
                piece = self._found(pieces, wanted.blocks[first // PIECE].name)
                if piece is None:
                    break
                bank, have = here(done)
                write_piece(bank, piece, row, max(0, have - row))
                done = stop
                if progress is not None:
                    progress(done, len(ids))
        return done

    def _read(self, block: Block, tokens: Sequence[int], piece: torch.Tensor) -> None:
        """Read the rows of a block, which must be of these tokens. Raises SavedFileError."""
        stored = torch.empty(PIECE, dtype=torch.int64)
        with Reader(self.path(block.name)) as reader:
            reader.read("ids", stored)
            if reader.facts != block._asdict() or stored.tolist() != list(tokens):
                raise reader.damaged("it is another block than its name says")
            reader.read("rows", piece)

    def _found(self, pieces: Iterator[torch.Tensor], name: str) -> torch.Tensor | None:
        """Return the next piece of the block of this name; None if the block is gone, or was
        damaged and has been removed.
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

    def store(self, session: SessionState) -> int:
        """Write the whole blocks of a session that are not here yet; how many were written."""
        return sum(1 for _ in self.storing(session))

    def storing(self, session: SessionState) -> Iterator[None]:
        """As `store`, one block after the other; of a model that ranks hold, all at once."""
        if unfit(session.planner) or session.bank.lacks:
            return
        if session.loaded.peers is not None:
            yield from [None] * stored(session, self)
            return
        if (yield from self._writing(session)):
            self._shrink()

    def _stored(self, session: SessionState) -> int:
        """Write a rank's blocks of a session that are not here yet; how many rank 0 has written."""
        written, loaded = 0, session.loaded
        with agreed(loaded):
            written = sum(1 for _ in self._writing(session))
        of_ranks = [count for (count,) in loaded.peers.said(written)]
        if loaded.peers.rank == 0 and any(of_ranks):
            self._shrink()
        return of_ranks[0]

    def _writing(self, session: SessionState) -> Generator[None, None, int]:
        """Write what is not here yet, one block after the other; how many those were."""
        written, blocks = 0, _blocks(session.loaded, session.ids, session.origins)
        for number, block in enumerate(blocks):
            if self.path(block.name).is_file():
                continue
            with exclusive(session.loaded):
                done = self._write(session, block, number * PIECE)
            if not done:
                break
            written += 1
            yield
        if written:
            self._touch([block.name for block in blocks])
        return written

    def _write(self, session: SessionState, block: Block, first: int) -> bool:
        path = self.path(block.name)
        (bank, row), (_, stop) = session.bank.here(first), session.bank.here(first + PIECE)
        plan = [
            ("ids", torch.int64, (PIECE,)),
            ("rows", bank.dtype, piece_shape(bank, stop - row)),
        ]
        try:
            path.parent.mkdir(exist_ok=True, mode=0o700)
            with Writer(path, plan, block._asdict(), durable=False) as writer:
                writer.write("ids", torch.tensor(session.ids[first : first + PIECE]))
                writer.write("rows", read_piece(bank, row, stop))
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


def _same(folder: Path, limit: int) -> BlockCache:
    """The cache of a folder that is there."""
    cache = BlockCache.__new__(BlockCache)
    cache.folder, cache.limit, cache.announce = folder, limit, lambda line: None
    return cache


@led
def filled(
    session: SessionState, cache: BlockCache, ids: list[int], progress: Progress | None = None
) -> int:
    """As BlockCache.fill, on every rank of a model."""
    return cache._filled(session, ids, progress)


@led
def stored(session: SessionState, cache: BlockCache) -> int:
    """As BlockCache.store, on every rank of a model."""
    return cache._stored(session)


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass  # a folder that others own: the entry stays
