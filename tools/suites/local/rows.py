"""Rows of a local file of a benchmark, JSON lines or one JSON list, each field of its kind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.base.errors import UsageError

TEXT, TEXTS = "a text", "a list of texts"
Row = dict[str, Any]


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


def read(path: Path, fields: Mapping[str, str]) -> Table:
    """All rows of a file. fields: {name: TEXT or TEXTS}; a list of texts has one at least.

    Raises UsageError, with file, line or row, and field, for what is no such file.
    """
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}; expected a file of JSON lines in UTF-8") from None
    rows = [_checked(place, row, fields) for place, row in _parsed(path, text)]
    if not rows:
        raise UsageError(f"{path}: found no row, expected at least one")
    return Table(path, rows, hashlib.sha256(data).hexdigest())


def _parsed(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """(where it stands, the row) of every row; lines end at line feeds alone."""
    if text.lstrip()[:1] == "[":
        for number, row in enumerate(_json(f"{path}", text), 1):
            yield f"{path}, row {number}", row
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            place = f"{path}, line {number}"
            yield place, _json(place, line)


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
        value = row[name]
        listed = isinstance(value, list) and value and all(isinstance(v, str) for v in value)
        if not (isinstance(value, str) if kind == TEXT else listed):
            raise UsageError(f"{place}: field {name!r}: found {_shown(value)}, expected {kind}")
    return {name: row[name] for name in fields}


def _shown(value: Any) -> str:
    return f"{json.dumps(value)[:40]} ({type(value).__name__})"
