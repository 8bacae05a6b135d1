"""Every example runs as its docstring says, and prints what it promises.

Stops: an example that a newcomer copies and that fails, grows past a screen, or shows another
answer than the shipped model gives.
"""

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES = 40
# what the output must hold; an example that is not named here must print something
PROMISED = {
    "generate": ["The pass key of Bob is 41213.", "stop", "412|"],
    "long_document": ["tokens read once", "is 66160.", "= 84872", "layer 2 chose 64 tokens"],
    "compare_methods": ["full        100%  100%  The pass key of Alice is 66160.", "omnikv", "h2o"],
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_and_keeps_its_promise(path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    runpy.run_module(f"examples.{path.stem}", run_name="__main__")
    printed = capsys.readouterr().out
    assert printed.strip()
    for text in PROMISED.get(path.stem, []):
        assert text in printed


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


def test_methods_disagree_where_tokens_were_given_up(capsys, monkeypatch):
    """The comparison must not become five equal rows: H2O has evicted the key that is asked for."""
    monkeypatch.chdir(ROOT)
    runpy.run_module("examples.compare_methods", run_name="__main__")
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "66160" in rows["omnikv"] and "66160" not in rows["h2o"]
