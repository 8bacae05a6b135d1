"""Every command of README.md and docs/*.md is known to tools.repo.docs_check, and the quick ones
run.

Stops: a page that shows a command nobody tried, a flag that is gone, a program whose --help says
nothing. `make docs-check` runs the slow ones too.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

from tools.__main__ import programs
from tools.repo import docs_check
from tools.repo.docs_check import Command, all_commands, check, commands, help_of

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = all_commands()
QUICK = [c for c in COMMANDS if c.rule and (c.rule.fast or c.rule.way in ("target", "extras"))]
SHARED = ("documents", "planted_selection", "program", "synthetic_bank")


def runnable():
    """Modules of tools that `python -m` runs, by name."""
    for path in sorted((ROOT / "tools").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        if path.name == "__main__.py" or re.search(r"^if __name__", path.read_text(), re.MULTILINE):
            yield module.removesuffix(".__main__")


PROGRAMS = [m for m in runnable() if m != "tools" and not m.startswith("tools.common.")]


def test_every_command_of_the_pages_has_its_rule():
    assert [c for c in COMMANDS if c.rule is None] == []
    assert len(COMMANDS) > 60
    assert all(c.rule.why for c in COMMANDS if c.rule.way == "skip")


@pytest.mark.parametrize("command", QUICK, ids=lambda command: command.text[:60])
def test_quick_commands_work(command, tmp_path):
    assert check(command, tmp_path) == ""


def test_what_is_no_command_any_more_fails(tmp_path):
    """A program, a flag, a target, an extra, a model that is not there."""
    for text, said in (
        ("python -m tools.bench --shapes 160m", "tools.bench has no flag --shapes"),
        ("python -m tools.nothing --x 1", "--help exits 1"),
        ("make nothing", "no rule knows it"),
        ("make bench ARGS=--nothing", "tools.bench has no flag --nothing"),
        ("pip install '.[nothing]'", "no extra nothing"),
        ("python -m engine.chat --list-modles", "exit 2: "),
    ):
        assert said in check(Command("page", text), tmp_path), text


def test_commands_are_found_in_blocks_and_sentences():
    page = "Run `make quick`,\nor `python -m\ntools.bench -t 1`.\n\n```\n$ make chat   # it talks\n"
    page += "python -m tools.compare \\\n    --model X\nnot a command\n```\n`make` alone, `a | b`"
    found = [command.text for command in commands(page)]
    assert found == ["make chat", "python -m tools.compare --model X", "make quick"] + [
        "python -m tools.bench -t 1"
    ]


def test_one_page_is_checked_by_itself_and_says_how_much_of_it_ran(monkeypatch, capsys):
    """Its own commands, also those that another page has first; nothing counts as run that was only
    looked up.
    """
    checked = []
    monkeypatch.setattr(docs_check, "check", lambda command, out: checked.append(command) or "")
    monkeypatch.setattr(sys, "argv", ["docs_check", "--page", "docs/MACHINES.md"])
    assert docs_check.main() == 0
    assert {c.page for c in checked} == {"docs/MACHINES.md"} and len(checked) >= 5
    run, looked = re.search(r"MACHINES.md: (\d+) run, (\d+) by", capsys.readouterr().out).groups()
    assert int(run) >= 4 and int(run) + int(looked) == len(checked)
    (chat,) = [c for c in checked if c.text == "make chat"]  # README has it too
    assert chat.rule.way == "run"


def test_a_command_on_the_real_model_runs_where_that_is(monkeypatch, tmp_path):
    """Elsewhere its flags are looked up."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(docs_check, "REAL", tmp_path)
    command = Command("page", "python -m engine.chat --model $HOME/nothing -p hello")
    assert command.rule.way == "real" and "no such folder" in check(command, tmp_path)
    monkeypatch.setattr(docs_check, "REAL", tmp_path / "none")
    assert check(command, tmp_path) == ""
    assert "no flag --promt" in check(Command("page", command.text + " --promt"), tmp_path)


@pytest.mark.parametrize("module", PROGRAMS)
def test_every_program_of_tools_says_what_it_is(module):
    """usage: python -m MODULE, then a sentence; never the shell's line again."""
    said, code = help_of(module)
    assert code == 0 and said.startswith(f"usage: python -m {module} "), said[:200]
    about = re.sub(r"\s+", " ", said.split("\n\n")[1])
    assert re.match(r"[A-Z][^`]*[A-Za-z)][.:]", about), about


def test_every_program_is_in_the_list_with_a_sentence():
    assert programs().keys() == set(PROGRAMS)
    assert all(re.match(r"[A-Z]\w*[ ,]", about) for about in programs().values())


@pytest.mark.parametrize("name", SHARED)
def test_what_is_no_program_says_so(name, capsys):
    said, code = help_of(f"tools.common.{name}")
    assert code == 2 and "is no program" in said


def test_counting_launches_begins_with_its_help():
    said, code = help_of("tests.programs.launches")
    assert code == 0 and said.startswith("usage: python -m tests.programs.launches")


def test_the_readmes_comparison_fits_the_model_that_it_proposes():
    """SmolLM2-135M holds 8,192 tokens; a comparison needs 512 beside the longest document."""
    (text,) = [c.text for c in COMMANDS if c.page == "README.md" and "tools.compare" in c.text]
    lengths = re.search(r"--lengths ([\d ]+)", text)[1].split()
    assert max(map(int, lengths)) + 512 <= 8192


def test_examples_say_first_how_they_are_run():
    paths = sorted((ROOT / "examples").glob("*.py"))
    assert paths
    for path in paths:
        assert (ast.get_docstring(ast.parse(path.read_text())) or "").startswith("Run `python -m ")


def test_no_page_hides_its_commands_from_the_check():
    """Pages of PAGES are all that there are."""
    read = {str(path.relative_to(ROOT)) for path in docs_check.pages()}
    there = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")}
    assert there <= read | set(docs_check.DATED)
