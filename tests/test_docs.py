"""What the documents say of the code is so.

Stops: a link or a path that leads nowhere, an API page that lags behind the signatures, a quoted
example that is not the tested one, a README program that does not run, a line of prose that no
editor shows whole, a test that is not there.
"""

import re
import runpy
from pathlib import Path

import pytest

from engine.methods.registry import methods
from tools.repo import api_page

ROOT = Path(__file__).resolve().parents[1]
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = [*TOP, *sorted((ROOT / "docs").glob("*.md")), ROOT / "examples" / "README.md"]
PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
ROOTS = r"(?:engine|kernels|weights|tools|tests|docs|examples|benchmarks)"
MENTION = re.compile(rf"(?<![\w./-])({ROOTS}/[\w/.-]*[\w-](?:\.\w+|/))(?![\w*{{-])")
TEST = re.compile(r"(tests/[\w/]+\.py)::(\w+)")
LINK = re.compile(r"\]\(([^)\s]+)\)")
WIDTH = 100


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def prose(text: str):
    """(number, line) of everything outside code blocks."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            yield number, line


def anchors(page: Path) -> set[str]:
    """The anchors that a renderer makes of a page's headings."""
    heads = (line.lstrip("#").strip() for _, line in prose(read(page)) if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@PAGE
def test_every_relative_link_leads_somewhere(page):
    for _, line in prose(read(page)):
        for target in LINK.findall(line):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            found = (page.parent / name).resolve() if name else page
            assert found.exists(), target
            assert not anchor or anchor in anchors(found), target


@PAGE
def test_every_path_that_is_mentioned_exists(page):
    lost = [name for name in MENTION.findall(read(page)) if not (ROOT / name).exists()]
    assert not lost, lost


@PAGE
def test_every_test_that_is_mentioned_exists(page):
    lost = [
        f"{file}::{name}"
        for file, name in TEST.findall(read(page))
        if not re.search(rf"^ *(?:async )?def {name}\(", read(ROOT / file), re.MULTILINE)
    ]
    assert not lost, lost


@PAGE
def test_lines_of_prose_end_at_100_columns(page):
    long = [
        f"{number}: {line[:60]}..."
        for number, line in prose(read(page))
        if len(line) > WIDTH and not line.startswith("|") and not LINK.search(line)
    ]
    assert not long, long


def test_the_rules_find_what_they_forbid():
    assert MENTION.findall("see `engine/none.py`, docs/x.md and engine/bank/.") == [
        "engine/none.py",
        "docs/x.md",
        "engine/bank/",
    ]
    assert TEST.findall("`tests/test_docs.py::test_none` (a case)") == [
        ("tests/test_docs.py", "test_none")
    ]
    assert LINK.findall("see [a](b.md#c) and [d](e).") == ["b.md#c", "e"]
    assert not MENTION.findall("tools/pocket_*.py, /engine/x.py, https://a.b/tests/x.py")


def test_the_pages_are_all_in_the_index():
    index = read(ROOT / "docs/README.md")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"[{page.name}]({page.name})" in index, page.name


def test_every_method_has_its_row():
    page = read(ROOT / "docs/METHODS.md")
    for name, cls in methods().items():
        if cls.__module__.startswith("engine."):
            assert f"| `{name}`, `{cls.__name__}` |" in page, name


def test_the_api_page_is_current():
    assert api_page.page() == read(api_page.PAGE), "run python -m tools.repo.api_page"


def test_quoted_programs_are_the_tested_ones():
    """Each marker is followed by a code block that stands in the file so."""
    text = read(ROOT / "docs/METHODS.md")
    quotes = re.findall(r"<!-- quote: (\S+) -->\n+```python\n(.*?)```", text, re.DOTALL)
    assert len(quotes) == text.count("<!-- quote:") == 2
    for name, quoted in quotes:
        assert quoted in read(ROOT / name), name


def test_the_readmes_program_runs(tmp_path, monkeypatch, capsys):
    (program,) = re.findall(r"```python\n(.*?)```", read(ROOT / "README.md"), re.DOTALL)
    script = tmp_path / "program.py"
    script.write_text(program, encoding="utf-8")
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(script))
    printed = capsys.readouterr().out
    assert "is 66160." in printed and "= 84872" in printed


@PAGE
def test_blocks_of_code_begin_and_end_on_lines_of_their_own(page):
    """A page that is wrapped through its blocks reads as one long line of commands."""
    fences = [line for line in read(page).splitlines() if line.lstrip().startswith("```")]
    assert len(fences) % 2 == 0 and all(len(fence.split()) == 1 for fence in fences), fences
