"""A coding agent's turns (tests/programs/agent_turns.py, briefly), and a control of its count."""

from dataclasses import replace

import pytest

from tests.engine.serve.tool_checkpoint import tool_checkpoint
from tests.programs.agent_turns import rows, run, wrong


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tool_checkpoint(tmp_path_factory.mktemp("agent"))


@pytest.mark.parametrize("method", ["full", "omnikv"])
def test_no_turn_reads_what_an_earlier_one_left(checkpoint, method):
    turns = run(checkpoint, method, 13, 1)
    assert not wrong(method, turns)
    kinds = {turn.kind: turn for turn in turns}
    assert len(kinds) == 5 and len(list(rows(method, turns))) == 5
    assert kinds["call and result"].read < kinds["call and result"].prompt / 4
    assert kinds["old result cleared"].read > 1000  # all behind it
    again = [replace(turns[3], read=turns[3].read + 1)]
    assert len(wrong(method, again)) == 1 and "turn 0, call and result" in wrong(method, again)[0]
    assert wrong("full" if method == "omnikv" else "omnikv", turns)
