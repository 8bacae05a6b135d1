"""The schedule of a step over more threads: what it gains, where it bends, and a table of a tiny
model. Stops: pieces that are shared by halves, a rest that threads shorten.
"""

import json

import pytest

from tools.speed import gain
from tools.speed.threads import Call, bend, main, schedule

CALLS = {"one": Call(2, 8e-3, 8, 1 << 20), "other": Call(1, 3e-3, 3, 1 << 20)}


@pytest.mark.parametrize(
    "threads, wanted", [(1, 20e-3), (2, 11e-3), (4, 6e-3), (8, 4e-3), (64, 4e-3)]
)
def test_a_call_takes_as_long_as_who_has_most_of_its_pieces(threads, wanted):
    assert schedule(CALLS, 1e-3, 0.0, threads) == pytest.approx(wanted)


def test_each_shared_call_costs_what_joining_does():
    assert schedule(CALLS, 1e-3, 1e-3, 2) == pytest.approx(14e-3)
    assert schedule(CALLS, 1e-3, 1e-3, 1) == pytest.approx(20e-3)


def test_a_step_bends_where_twice_the_threads_take_less_than_a_quarter_off():
    assert bend(CALLS, 1e-3, 0.0) == 8
    assert bend(CALLS, 1.0, 0.0) == 1


def test_a_table_of_a_small_model(tmp_path, capsys):
    out = tmp_path / "threads.json"
    flags = ["--shape", "small", "--dtype", "bfloat16", "--contexts", "1500", "--rounds", "1"]
    assert main([*flags, "--json", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["calls"]["attention"]["pieces"] == 4  # two heads, two pieces of 1,024 rows
    assert row["calls"]["attention"]["bytes"] == 1500 * 2 * 2 * 32 * 2
    steps = row["simulated"]
    assert steps["1"] == pytest.approx(
        row["seconds"]["not shared"]
        + sum(call["times"] * call["seconds"] for call in row["calls"].values())
    )
    assert "| attention |" in capsys.readouterr().out


def test_counts_that_time_nothing_are_refused(capsys):
    assert main(["--shape", "small", "--rounds", "0"]) == 2
    assert "--rounds: found 0, expected 1" in capsys.readouterr().err


def test_gains_stand_beside_memorys(tmp_path, capsys):
    out = tmp_path / "gain.json"
    flags = ["--shape", "small", "--contexts", "300", "--prompts", "200", "--rounds", "2"]
    assert gain.main([*flags, "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["name"] for row in rows] == ["memory, 256 MiB", "full", "omnikv", "full"]
    for row in rows:
        assert 0 < row["least"] <= row["gain"] <= row["most"]
        if row["name"].startswith("memory"):  # 256 MiB in milliseconds, not its inverse
            assert 1e-4 < row["all"] < 10
    assert "| a prompt of 200 | full |" in capsys.readouterr().out
