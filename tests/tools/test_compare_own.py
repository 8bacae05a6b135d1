"""A method of one's own is compared without editing the tools, and --minutes bounds the warm-up.

Stops: `unknown method` for a method that the chat runs, answers of two versions of a file in one
folder, a run of --minutes 1 that warms up for four.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clocks import set_clock
from tools.compare import cli as compare
from tools.compare.methods import REGISTRY
from tools.fidelity import cli as fidelity

ROOT = Path(__file__).resolve().parents[2]
OWN = ROOT / "examples" / "own_evicting.py"
FLAGS = ["--dtype", "float32", "--tasks", "kv", "--answers", "2", "--questions", "2"]
FLAGS += ["--max-tokens", "3", "--lengths", "400", "--no-controls", "--turns", "1"]


@pytest.fixture(autouse=True)
def own_table():
    """Own methods leave the table with the test."""
    before = dict(REGISTRY)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def run(tiny, out, *more, processes="1"):
    flags = ["--model", str(tiny), "--out", str(out), "--processes", processes, *FLAGS]
    return compare.main([*flags, *more])


def records(out):
    return [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()][1:]


def test_an_own_method_is_compared(tiny, tmp_path, capsys):
    assert run(tiny, tmp_path, "--import", str(OWN), "--methods", "knorm@30", "snapkv@30") == 0
    page = capsys.readouterr().out
    assert "knorm 30%" in page
    found = {r["variant"]: r for r in records(tmp_path)}
    assert set(found) == {"full", "knorm 30%", "snapkv 30%"}
    assert found["knorm 30%"]["bytes_read"] < found["full"]["bytes_read"] / 2


def test_workers_know_it_too(tiny, tmp_path):
    """In processes of their own, which import the file anew."""
    flags = ["--model", str(tiny), "--out", str(tmp_path), "--processes", "2", *FLAGS]
    more = ["--import", "examples/own_selecting.py", "--methods", "blockmean@30"]
    command = [sys.executable, "-m", "tools.compare", *flags, *more]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert {r["variant"] for r in records(tmp_path)} == {"full", "blockmean 30%"}


def test_other_contents_of_the_file_do_not_join_its_answers(tiny, tmp_path, capsys):
    own = tmp_path / "mine.py"
    own.write_text(OWN.read_text().replace("KNorm", "Mine"))
    flags = ["--import", str(own), "--methods", "mine@30"]
    assert run(tiny, tmp_path / "out", *flags) == 0
    own.write_text(own.read_text().replace("return -part", "return part"))
    assert run(tiny, tmp_path / "out", *flags) == 2
    assert "answers of other settings" in capsys.readouterr().err


def test_fidelity_takes_it(tiny, tmp_path, capsys):
    flags = ["--model", str(tiny), "--dtype", "float32", "--out", str(tmp_path), "--texts", "1"]
    flags += ["--lengths", "300", "--positions", "4", "--answer", "0", "--filters", "2"]
    flags += ["--kinds", "prose", "--waits", "0", "--methods", "knorm@30"]
    assert fidelity.main([*flags, "--import", str(OWN)]) == 0
    assert "knorm 30%" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, said",
    [
        (None, "found none.py: "),
        ("import nothing_of_this_name", "No module named 'nothing_of_this_name'"),
        ("def x(:", "line 1"),
        ("x = 1", "defines no method"),
        (OWN.read_text().replace("KNorm", "SnapKV"), "there is a method of this name"),
    ],
)
def test_a_file_that_brings_no_method_is_refused(text, said, tiny, tmp_path, capsys):
    own = tmp_path / ("none.py" if text is None else "mine.py")
    if text is not None:
        own.write_text(text)
    assert run(tiny, tmp_path / "out", "--import", str(own), "--methods", "mine@30") == 2
    (line,) = [li for li in capsys.readouterr().err.splitlines() if li.startswith("error: ")]
    assert "--import: " in line and said in line


def test_an_unknown_name_says_what_to_do(tiny, tmp_path, capsys):
    assert run(tiny, tmp_path, "--methods", "vnorm@30") == 2
    assert "--import FILE" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        compare.main(["--help"])
    assert "--import FILE" in capsys.readouterr().out


# ---------------------------------------------------------------- the warm-up


def test_the_warm_up_ends_with_the_minutes(tiny, tmp_path, capsys, monkeypatch):
    """After the method under way; a line for each; nothing is answered."""
    now = iter(range(0, 10_000, 7))
    set_clock(monkeypatch, "monotonic", lambda: next(now))
    names = ["h2o@10", "h2o@30", "snapkv@10", "snapkv@30", "quest@30", "tidaldecode@30"]
    assert run(tiny, tmp_path, "--minutes", "0.5", "--no-controls", "--methods", *names) == 0
    said = capsys.readouterr().err
    assert "stopped after 0.5 minutes with 1 of 1 documents to do" in said and "warm-up" in said
    lines = [line for line in said.splitlines() if line.startswith("  400 tokens, ")]
    assert 1 <= len(lines) < len(names) and "full" in lines[0]
    assert not records(tmp_path)


def test_only_what_runs_is_warmed_up(tiny, tmp_path, capsys):
    """A length whose answers are there takes no time again."""
    flags = ["--methods", "snapkv@30", "quest@30", "--no-controls"]
    assert run(tiny, tmp_path, *flags) == 0
    warmed = [line for line in capsys.readouterr().err.splitlines() if "tokens, 1 of " in line]
    assert len(warmed) == 1 and warmed[0].startswith("  400 tokens, 1 of 3: full ")
    assert run(tiny, tmp_path, *flags, "--lengths", "400", "500") == 0
    said = capsys.readouterr().err
    assert "  500 tokens, 3 of 3: quest 30% " in said and "  400 tokens, 1 of" not in said
