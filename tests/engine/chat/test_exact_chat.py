"""Exact mode on the command line and in the chat: flags, the method's line, the closing figures.

Stops: a flag that does nothing, an answer that differs from full attention's, a refusal of many
lines.
"""

import io
import json

import pytest

from engine.chat.cli import main
from tests.builders import ROOT

ASK = ["--quiet", "--threads", "1", "--dense-below", "0", "--tokens", "32", "--tail", "64"]
DOCUMENT = ROOT / "weights" / "pocket" / "hint.txt"


def answer(capsys, *flags):
    """The JSON of one answer of the shipped model."""
    command = [*ASK, "--json", "-n", "24", "-f", str(DOCUMENT), "-p", "What is the pass key?"]
    assert main([*command, *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_exact_answers_as_full_attention_and_says_what_it_gained(capsys):
    full = answer(capsys, "--dtype", "float32", "--filter-layers", "0", "--tokens", "100000")
    exact = answer(capsys, "--dtype", "float32", "--exact", "--draft", "4")
    assert exact["token_ids"] == full["token_ids"] and exact["text"] == full["text"]
    assert exact["stats"]["drafted"] > 0 and exact["stats"]["speedup"] > 0
    assert exact["method"].startswith("Exact(") and full["stats"]["drafted"] == 0


def test_the_commands_of_the_chat(capsys, monkeypatch):
    lines = ["/method exact draft=3", "Hello", "/stats", "/method exact draft=9", "/method"]
    lines += ["/method exact page=1", "/method omnikv", "/method full", "/method exact"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    main([*ASK[1:], "-n", "12", "-f", str(DOCUMENT), "-i"])
    said = capsys.readouterr().err
    assert "draft=3): nothing is read again" in said
    assert "drafts right (" in said and "x full attention (counted)" in said
    assert "error: draft: found 9, expected 'auto' or an int from 0 to 7" in said
    assert "error: page: exact has no such setting; it takes draft, lookup" in said
    assert "error: method: full cannot draft for exact mode" in said


def test_sources_are_those_of_the_drafts_and_are_called_so(capsys, monkeypatch, tmp_path):
    """Of an answer whose drafts chose; without drafts it says that none did."""
    page = tmp_path / "page.json"
    lines = ["/method exact draft=3", "Hello", "/sources 2", f"/sources {page}"]
    lines += ["/method exact draft=0", "Hello", "/sources"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    welcome = DOCUMENT.with_name("welcome.txt")
    main([*ASK[1:], "-n", "12", "-f", str(DOCUMENT), "-f", str(welcome), "-i"])
    said = capsys.readouterr().err
    assert "the passages that the drafts of the last answer read most" in said
    assert "full attention read every token and decided every word; drafts guessed them" in said
    assert "welcome.txt, line" in said and "no draft was made by a sparse step" in said
    run = json.loads(page.read_text())
    assert run["method"].endswith(", its drafts") and any(read for _, read in run["answer"])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--draft", "3"], "--draft: belongs to --exact, which was not given"),
        (["--exact", "--draft", "9"], "--draft: found 9, expected 'auto' or an int from 0 to 7"),
        (["--exact", "--method", "h2o"], "method: h2o cannot draft for exact mode"),
        (["--exact", "--set", "official=True"], "official=True"),
    ],
)
def test_flags_that_are_refused(flags, words, capsys):
    code = main(["--quiet", "-p", "x", *flags])
    said = capsys.readouterr().err
    assert code != 0 and words in said and said.count("\n") == 1
