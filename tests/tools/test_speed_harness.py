"""What the programs of tools/speed share.

Stops: a first turn, which loads libraries, in a median; a flag that is refused under another's
name; figures without the model and the machine that they are of.
"""

import json
from argparse import Namespace

import pytest

from engine.base.errors import UsageError
from tools.speed import bank, batch, cpu_forms, serve
from tools.speed.harness import in_turns, markdown, require, sizes


def test_ways_take_turns_and_the_first_is_not_counted():
    order = []
    ways = {name: lambda turn, name=name: order.append((name, turn)) or turn for name in "ab"}
    assert in_turns(ways, 2) == {"a": [1, 2], "b": [1, 2]}
    assert order == [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_a_flag_is_refused_by_its_own_name():
    flags = Namespace(steps=0, turns=3, contexts="8K,x")
    with pytest.raises(UsageError, match="--steps: found 0, expected 1 or more"):
        require(flags, 1, "turns", "steps")
    with pytest.raises(UsageError, match="--turns: found 3, expected 1 to 2"):
        require(flags, 1, "turns", most=2)
    with pytest.raises(UsageError, match="--contexts: found 'X'"):
        sizes(flags, "contexts")


def test_a_table_has_a_line_of_dashes_of_its_width():
    assert markdown("a | b", [(1, "x")]) == "| a | b |\n|---|---|\n| 1 | x |"
    assert markdown("a | b", [], align="---:") == "| a | b |\n|---|---:|"


@pytest.mark.parametrize(
    "program, flags",
    [(bank, "--contexts 300 --steps 1"), (batch, "--context 300 --slots 2 --turns 1")],
    ids=["bank", "batch"],
)
def test_steps_of_a_tiny_model(program, flags, tmp_path, capsys):
    assert program.main(f"--shape tiny {flags} --json {tmp_path}/r.json".split()) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    rows = found["rows"] if program is batch else found
    assert [(row["shape"], row["method"]) for row in rows] == [("tiny", "full"), ("tiny", "omnikv")]
    out = capsys.readouterr().out
    assert out.startswith("tiny, bfloat16, ") and "| 300 | omnikv | " in out


def test_what_cannot_be_measured_is_refused_before_anything_loads():
    assert serve.main(["--tokens", "1"]) == 2
    assert batch.main(["--threads", "100000"]) == 2
    assert cpu_forms.main(["--shape", "8x4"]) == 2
