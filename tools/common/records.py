"""answers.jsonl: the answers of a run, one a line after a line of settings, so that a run that was
stopped goes on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.base.errors import UsageError
from tools.common.program import replace_text

Record = dict[str, Any]
MOST, LETTERS = 3, 24  # differences that an error names, and letters of a value there


class AnswerFile:
    """The answers in a file. key(record) is equal for two answers to the same question by the same
    method.
    """

    def __init__(self, folder: Path, key: Callable[[Record], tuple], name: str = "answers.jsonl"):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.key = folder / name, key
        self.records: list[Record] = []
        self.done: set[tuple] = set()

    def load(self) -> Record | None:
        """Read the answers of an earlier run; returns its line of settings, None without one or
        without an answer: an estimate binds nobody.
        """
        header = None
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:  # the last line of a run that was killed
                continue
            if "settings" in record:
                header = record
            else:
                self._take([record])
        return header if self.records else None

    def go_on(
        self, there: Record | None, here: Record, new: Sequence[str] = (), **more: Any
    ) -> Record:
        """Write the header of a run, and the answers that were loaded; returns the header.

        there: an earlier run's header, None to begin. here: {"settings": what must be equal in
        both, another name: values by key, of which both may have others and none a different one}.
        new: settings that may come to those there. more: what is written and not compared. Raises
        UsageError where answers are of other settings or values.
        """
        here = json.loads(json.dumps(here))  # as it is read back: tuples are lists
        for part, own in here.items() if there is not None else ():
            before = there.get(part, {})
            both = before.keys() & own.keys()
            keys = before.keys() | own.keys() - {*new} if part == "settings" else both
            require_same(
                self.path, {k: (before.get(k), own.get(k)) for k in (before | own) if k in keys}
            )
            here[part] = before | own
        lines = [json.dumps({**here, **more}), *map(json.dumps, self.records)]
        replace_text(self.path, "\n".join(lines) + "\n")
        return here

    def add(self, records: Iterable[Record]) -> None:
        """Append answers; those that are there already are left out."""
        fresh = self._take(records)
        with open(self.path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(record) + "\n" for record in fresh))

    def _take(self, records: Iterable[Record]) -> list[Record]:
        fresh = [record for record in records if self.key(record) not in self.done]
        self.records += fresh
        self.done.update(map(self.key, fresh))
        return fresh


def require_same(path: Path, values: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise UsageError where one of {name: (before, now)} has changed."""
    other = [
        "{} was {} and is {} now".format(name, *_apart(*both))
        for name, both in values.items()
        if both[0] != both[1]
    ]
    if other:
        said = ", ".join(other[:MOST]) + (f", and {len(other) - MOST} more" if other[MOST:] else "")
        raise UsageError(
            f"{path} holds answers of other settings ({said}): use --fresh or another --out"
        )


def _apart(before: Any, now: Any) -> Iterator[str]:
    """Two values as texts; of long ones what follows where they part."""
    texts = [
        v["sha256"] if isinstance(v, dict) and "sha256" in v else str(v) for v in (before, now)
    ]
    start = max(0, len(os.path.commonprefix(texts)) - LETTERS // 3)
    for text in texts:
        long = len(text) > LETTERS
        cut = text[start : start + LETTERS] if long else text
        yield "..." * (long and start > 0) + cut + "..." * (long and start + LETTERS < len(text))
