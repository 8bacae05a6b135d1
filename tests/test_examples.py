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
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 40
# what the output must match; an example that is not named here must print something. The comparison
# must not become five equal rows: H2O has evicted the key that is asked for
PROMISED = {
    "generate": [r"The pass key of Bob is 41213\.  \(10 tokens, stop\)", r"\|412\|13\|"],
    "long_document": [
        r"1,585 tokens read once",
        r"is 66160\.",
        r"= 84872",
        r"layer 2 chose 64 tok",
    ],
    "compare_methods": [r"full +100% +100% .*66160", r"omnikv .*66160", r"h2o (?!.*66160)"],
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_keeps_its_promise(path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    runpy.run_module(f"examples.{path.stem}", run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.strip()
    for pattern in PROMISED.get(path.stem, []):
        assert re.search(pattern, printed), pattern


@pytest.mark.parametrize("name", PROMISED)
def test_an_example_fits_a_screen(name):
    lines = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < MOST_LINES


def test_examples_say_how_they_are_run_and_are_listed():
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES:
        command = f"python -m examples.{path.stem}"
        assert command in (ast.get_docstring(ast.parse(path.read_text())) or ""), path
        assert f"`{command}`" in listed, path
