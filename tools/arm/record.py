"""A plugin of pytest: keeps each test's outcome, and leaves out what passed with these sources."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from kernels.native import library

ROOT = Path(__file__).resolve().parents[2]
KEPT = ("passed", "skipped")


def digest() -> str:
    """The sha256 of every source that a test may read."""
    found = hashlib.sha256()
    for folder in ("kernels", "engine", "tests"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".h", ".cpp"):
                found.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


class Record:
    """Outcomes in a file, one a line."""

    def __init__(self, path: Path) -> None:
        self.path, self.sources = path, digest()
        self.done: set[str] = set()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = [line for line in lines if self._own(line)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def _own(self, line: str) -> bool:
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            return False
        if record["sources"] != self.sources:
            return False
        if record["outcome"] in KEPT:
            self.done.add(record["test"])
        return True

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out what has passed."""
        out = [item for item in items if item.nodeid in self.done]
        items[:] = [item for item in items if item.nodeid not in self.done]
        config.hook.pytest_deselected(items=out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a test's outcome: that of its call, or of what failed or was skipped before."""
        if report.when != "call" and report.outcome == "passed":
            return
        record = {"test": report.nodeid, "outcome": report.outcome, "sources": self.sources}
        if report.failed:
            record["said"] = report.longreprtext[-4000:]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Begin where OMNIKV_ARM_RESULTS names a file. Other work may have the cores: a compiler gets
    more time.
    """
    library.PATIENCE = 1800
    if path := os.environ.get("OMNIKV_ARM_RESULTS"):
        config.pluginmanager.register(Record(Path(path)))
