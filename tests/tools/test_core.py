"""The core does not grow: the files that one answer goes through, and their lines.

`python -m tools.repo.core --write` takes today's; a commit that adds to them says why.
"""

import json
import sys
from pathlib import Path

import pytest

from tools.repo import core


@pytest.fixture(scope="module")
def kept():
    return json.loads(core.KEPT.read_text(encoding="utf-8"))


def test_one_answer_goes_through_no_more_files_and_lines(kept):
    now, was = core.measured(), kept["files"]
    grown = [f"{name}: {n} lines, was {was.get(name, 0)}" for name, n in now.items()]
    grown = [line for line, (name, n) in zip(grown, now.items()) if n > was.get(name, 0)]
    assert not now.keys() - was.keys(), "\n".join(grown)
    assert sum(now.values()) <= sum(was.values()), "\n".join(grown)


def test_kept_files_are_there(kept):
    assert [name for name in kept["files"] if not (core.ROOT / name).is_file()] == []


def test_only_what_runs_after_its_import_is_noted(tmp_path, monkeypatch):
    (tmp_path / "engine").mkdir()
    for name, text in {
        "calls": "def f():\n    pass\nclass C:\n    x = 1\n",
        "at_import": "def f():\n    pass\nf()\n",
    }.items():
        (tmp_path / "engine" / f"core_{name}.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "engine"))
    watch, before = core.Watch(tmp_path), sys.getprofile()
    sys.setprofile(watch)
    try:
        import core_at_import  # noqa: F401
        import core_calls

        assert not watch.files
        core_calls.f()
    finally:
        sys.setprofile(before)
    assert [Path(name).name for name in watch.files] == ["core_calls.py"]
