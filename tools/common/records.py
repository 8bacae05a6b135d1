"""answers.jsonl: the answers of a run, one a line after a line of settings, so that a run that was
stopped goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from engine.base.errors import UsageError
from tools.common.program import replace_text

Record = dict[str, Any]


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
        """Read the answers of an earlier run; returns its line of settings, None without one."""
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
        return header

    def start(self, header: Record) -> None:
        """Write the settings and the answers that were loaded."""
        lines = [json.dumps(header), *map(json.dumps, self.records)]
        replace_text(self.path, "\n".join(lines) + "\n")

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


def require_same(path: Path, there: Record, here: Record) -> None:
    """Raise UsageError where the answers in a file are of other settings than a run's."""
    other = {k: there.get(k) for k in {**there, **here} if there.get(k) != here.get(k)}
    if other:
        raise UsageError(
            f"{path} holds answers of other settings ({other}): use --fresh or another --out"
        )
