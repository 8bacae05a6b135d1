"""Rows of a local file of a benchmark, JSON lines or one JSON list, each field of its kind.

A file is read line by line, and a text that several rows have is kept once: a book has many
questions.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.base.errors import UsageError

TEXT, TEXTS = "a text", "a list of texts"
EITHER = "a text or a list of texts"
FOUR = "a list of four texts"
WHOLE = "a whole number"
NUMBERS = "a number or a list of numbers"
Row = dict[str, Any]
WRITTEN_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


KINDS: dict[str, Callable[[Any], bool]] = {
    TEXT: lambda value: isinstance(value, str),
    TEXTS: _texts,
    EITHER: lambda value: isinstance(value, str) or _texts(value),
    FOUR: lambda value: _texts(value) and len(value) == 4,
    WHOLE: lambda value: isinstance(value, int) and not isinstance(value, bool),
    NUMBERS: lambda value: bool(numbers(value)),
}


@dataclass(frozen=True)
class Table:
    """A file's rows with the fields that were asked for, and its SHA-256."""

    path: Path
    rows: list[Row]
    digest: str


def find(folder: Path, inside: Sequence[str], name: str) -> Path | None:
    """The file `name` in a folder or in one of these folders of it; None where it is nowhere."""
    for each in ("", *inside):
        if (folder / each / name).is_file():
            return folder / each / name
    return None


def numbers(value: Any) -> list[int | float]:
    """The numbers of a field: of a number, a list, or a list in a list, as JSON's own or written
    out (as the package datasets exports them). Empty where it has anything else.
    """
    while isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    found = [_number(each) for each in (value if isinstance(value, list) else [value])]
    return [] if None in found else [each for each in found if each is not None]


def _number(value: Any) -> int | float | None:
    if isinstance(value, str) and (match := WRITTEN_NUMBER.fullmatch(value)):
        return float(value) if match[1] else int(value)
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if known else None


def read(path: Path, fields: Mapping[str, str]) -> Table:
    """All rows of a file. fields: {name: one of KINDS}; a list of texts has one at least.

    Raises UsageError, with file, line or row, and field, for what is no such file.
    """
    digest, texts = hashlib.sha256(), dict[str, str]()
    rows = []
    try:
        with path.open("rb") as file:
            for place, row in _parsed(path, _lines(file, digest.update)):
                found = _checked(place, row, fields)
                rows.append({k: _kept(v, texts) for k, v in found.items()})
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}; expected a file of JSON lines in UTF-8") from None
    if not rows:
        raise UsageError(f"{path}: found no row, expected at least one")
    return Table(path, rows, digest.hexdigest())


def _kept(value: Any, texts: dict[str, str]) -> Any:
    """A value; of equal texts the first."""
    return texts.setdefault(value, value) if isinstance(value, str) else value


def _lines(file: Iterator[bytes], see: Callable[[bytes], None]) -> Iterator[str]:
    """The text of every line, which line feeds alone end; `see` gets all bytes."""
    for number, line in enumerate(file):
        see(line)
        yield line.decode("utf-8-sig" if number == 0 else "utf-8")


def _parsed(path: Path, lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    """(where it stands, the row) of every row."""
    first = True
    for number, line in enumerate(lines, 1):
        if first and line.lstrip()[:1] == "[":
            for place, row in enumerate(_json(f"{path}", line + "".join(lines)), 1):
                yield f"{path}, row {place}", row
        elif line.strip():
            where, first = f"{path}, line {number}", False
            yield where, _json(where, line)


def _json(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise UsageError(f"{place}: found no JSON ({error}); is the file whole?") from None


def _checked(place: str, row: Any, fields: Mapping[str, str]) -> Row:
    if not isinstance(row, dict):
        raise UsageError(f"{place}: found {type(row).__name__}, expected an object with fields")
    for name, kind in fields.items():
        if name not in row:
            raise UsageError(f"{place}: found no field {name!r}, expected {kind} there")
        if not KINDS[kind](row[name]):
            raise UsageError(f"{place}: field {name!r}: found {_shown(row[name])}, expected {kind}")
    return {name: row[name] for name in fields}


def _shown(value: Any) -> str:
    return f"{json.dumps(value)[:40]} ({type(value).__name__})"
