"""Every example runs as its docstring says, and prints what it promises.

Stops: an example that a newcomer copies and that fails, grows past a screen, or shows another
answer than the shipped model gives.
"""

import ast
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# own_*.py are methods: tests/engine/methods/test_own_methods.py runs them
PROGRAMS = sorted(set((ROOT / "examples").glob("*.py")) - set((ROOT / "examples").glob("own_*.py")))
MOST_LINES = 40
# What the output must match. The comparison must not become five equal rows: H2O has evicted the
# key that is asked for.
PROMISED = {
    "generate": [r"The pass key of Bob is 41213\.  \(10 tokens, stop\)", r"\|412\|13\|"],
    "long_document": [
        r"1,585 tokens read once",
        r"is 66160\.",
        r"= 84872",
        r"layer 2 chose 64 tok",
    ],
    "desktop_tool": [r"100% read, 0 s left", r"is 66160\."],
    "web_handler": [r"Alice -> .*66160(.|\n)*Bob -> .*41213(.|\n)*Alice -> .*66160"],
    # four readings of 1,500 tokens at most, not a hundred
    "batch_job": [r"66160\. x 50", r"84872 x 50", r"100 answers: [1-7],\d{3} tokens read, 15"],
    "with_transformers": [
        r"sdpa: .*66160\.",
        r"omnikv: .*66160\.",
        r"layer 2 chose 64 of 1,6\d\d tokens",
    ],
    "compare_methods": [r"full +100% +100% .*66160", r"omnikv .*66160", r"h2o (?!.*66160)"],
}
NEEDS = {"web_handler": ("starlette", "httpx"), "with_transformers": ("transformers",)}


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_an_example_runs_and_keeps_its_promise(path, capsys, monkeypatch):
    for package in NEEDS.get(path.stem, ()):
        pytest.importorskip(package)
    monkeypatch.chdir(ROOT)
    runpy.run_module(f"examples.{path.stem}", run_name="__main__")
    printed = capsys.readouterr().out
    for pattern in PROMISED[path.stem]:
        assert re.search(pattern, printed), pattern


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_an_example_fits_a_screen(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < MOST_LINES


def test_examples_say_how_they_are_run_and_are_listed():
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for path in PROGRAMS:
        command = f"python -m examples.{path.stem}"
        assert command in (ast.get_docstring(ast.parse(path.read_text())) or ""), path
        assert f"`{command}`" in listed, path
