"""A session that several ranks hold, on disk: a file of each rank's rows, and a manifest.

The manifest stands under the name that was asked for. It says how many ranks there were, and the
digest of each one's file, which covers that file's every byte. A rank's file lies beside it under a
name of its own, which no earlier save had. The manifest is renamed into place when all ranks have
forced theirs to the disk, and the earlier save's files go after that: a rank that is killed in
between leaves the earlier save whole, or the new one.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.base.errors import RankLost, SavedFileError
from engine.load.loaded import Loaded
from engine.runner.ranks.agreed import agreed
from engine.saved.container import Reader, Writer, runs

SPLITS = ("heads", "context")  # by what ranks may have divided a session's rows
NUMBER = re.compile(r"(\d{1,10})-[0-9a-f]{16}")  # of a save: its process, and chance
VERSION = 1


def share_path(path: Path, number: str, rank: int) -> Path:
    """The file of a rank's rows of one save at `path`."""
    return path.with_name(f"{path.name}.{number}.rank{rank}")


# ---------------------------------------------------------------- saving


def save_shares(loaded: Loaded, path: Path, tokens: int, write: Callable[[Path], str]) -> None:
    """Write a session of `tokens` tokens to `path`, on every rank. write(path): writes this rank's
    file and returns its digest. Raises SavedFileError on all ranks where one's disk refuses, and
    leaves what was there.
    """
    peers = loaded.peers
    number = peers.texts(f"{os.getpid()}-{secrets.token_hex(8)}")[0]
    own, digest = share_path(path, number, peers.rank), ""
    try:
        with agreed(loaded):
            digest = write(own)
        digests = peers.texts(digest)
        with agreed(loaded):
            if peers.rank == 0:
                _write_manifest(path, number, tokens, digests, split_of(loaded))
    except RankLost:
        raise  # the manifest may be there: the next save removes what it does not name
    except BaseException:
        own.unlink(missing_ok=True)
        raise


def split_of(loaded: Loaded) -> str:
    """By what the ranks of a model have divided a session's rows."""
    return "heads" if loaded.config.context is None else "context"


def _write_manifest(path: Path, number: str, tokens: int, digests: list[str], split: str) -> None:
    before = number_of(path)
    facts = {
        "version": VERSION,
        "split": split,
        "ranks": len(digests),
        "save": number,
        "tokens": tokens,
        "digests": digests,
    }
    with Writer(path, [], facts):
        pass
    remove_shares(path, before, number)


def remove_shares(path: Path, before: str, now: str = "") -> None:
    """Remove the ranks' files of saves at `path` that are over: of `before`, of this process and of
    those that have ended, but for those of `now`.
    """
    for file in path.parent.glob(f"{_literal(path.name)}.*-*.rank*"):
        number = file.name.removeprefix(f"{path.name}.").rpartition(".rank")[0]
        known = NUMBER.fullmatch(number)
        if known is None or number == now:
            continue
        process = int(known[1])
        if number == before or process == os.getpid() or not runs(process):
            file.unlink(missing_ok=True)


def _literal(name: str) -> str:
    """A file's name as a pattern that finds it alone."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def number_of(path: Path) -> str:
    """The save that a manifest at `path` names; "" where there is none, or another file."""
    try:
        with Reader(path) as reader:
            return _facts(reader)["save"] if is_manifest(reader.facts) else ""
    except SavedFileError:
        return ""


def saved_bytes(path: Path) -> int:
    """Bytes of a saved session, those of all its files."""
    number, size = number_of(path), path.stat().st_size
    files = path.parent.glob(f"{_literal(path.name)}.{number}.rank*") if number else ()
    return size + sum(file.stat().st_size for file in files)


# ---------------------------------------------------------------- restoring


def is_manifest(facts: Any) -> bool:
    """Whether a file's facts are those of a manifest."""
    return isinstance(facts, dict) and "split" in facts


def open_share(path: Path, loaded: Loaded) -> Reader:
    """Open the file of a session at `path` that this process reads: its rank's, or of one process
    the file itself. Raises SavedFileError for a session that was saved at another split.
    """
    reader, peers = Reader(path), loaded.peers
    try:
        found = _saved_by(reader)
        here = "one process" if peers is None else _ranks(peers.size, split_of(loaded))
        if found != here:
            remedy = "leave --ranks and --numa out"
            if is_manifest(reader.facts):
                facts = _facts(reader)
                remedy, split = f"use --ranks {facts['ranks']}", facts["split"]
                remedy += "" if split == split_of(loaded) else f" --split-by {split}"
            raise SavedFileError(
                f"{path}: saved by {found}, found {here}; {remedy}, or read the text again"
            )
        if peers is None:
            return reader
        facts = _facts(reader)
    except BaseException:
        reader.close()
        raise
    reader.close()
    own = Reader(share_path(path, facts["save"], peers.rank))
    if own.digest != facts["digests"][peers.rank]:
        own.close()
        raise own.damaged(f"it is of another save than {path.name} names")
    return own


def _saved_by(reader: Reader) -> str:
    facts = reader.facts
    if is_manifest(facts):
        found = _facts(reader)
        return _ranks(found["ranks"], found["split"])
    if isinstance(facts, dict) and "share" in facts:
        raise SavedFileError(
            f"{reader.path}: found one rank's part of a session, expected the file beside it "
            "without .rank in its name"
        )
    return "one process"


def _ranks(count: int, split: str) -> str:
    return f"{count} ranks by {split}"


def _facts(reader: Reader) -> dict[str, Any]:
    """A manifest's facts, checked."""
    facts = reader.facts
    number, count, digests = (facts.get(name) for name in ("save", "ranks", "digests"))
    whole = (
        facts.get("version") == VERSION
        and facts["split"] in SPLITS
        and type(count) is int
        and 2 <= count <= 1024
        and isinstance(number, str)
        and NUMBER.fullmatch(number) is not None
        and isinstance(digests, list)
        and len(digests) == count
        and all(isinstance(digest, str) for digest in digests)
    )
    if not whole:
        raise reader.damaged("it names no files of ranks")
    return dict(facts)
