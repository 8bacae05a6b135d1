"""A server under many clients (tests/programs/server_load.py, briefly), and a control of what it
sees.
"""

import pytest

from tests.clocks import set_clock
from tests.programs import server_load
from tests.programs.server_load import run


def test_clients_that_stay_leave_dawdle_or_talk_nonsense(tmp_path):
    load = run(tmp_path, 6, 0.1, 1, say=lambda line: None)
    assert not load.wrong
    assert load.counts["whole"] + load.counts["streamed"] > 0


def test_an_answer_that_is_another_one_is_a_fault():
    load = server_load.Load("", {"a text": "right"}, 0.0)
    server_load.compare(load, "a text", "wrong", "whole")
    server_load.compare(load, "a text", "right", "whole")
    assert len(load.wrong) == 1 and "found 'wrong', expected 'right'" in load.wrong[0]


@pytest.mark.parametrize("status", [200, 429, 500])
def test_a_refusal_that_the_server_does_not_mean_is_a_fault(status, monkeypatch):
    set_clock(monkeypatch, "sleep", lambda seconds: None)
    headers = {"retry-after": "1"} if status == 429 else {}
    reply = server_load.httpx.Response(status, headers=headers, text="no")
    load = server_load.Load("", {}, 0.0)
    assert server_load.refused(load, reply, server_load.random.Random(0)) == (status != 200)
    assert len(load.wrong) == (status == 500)
