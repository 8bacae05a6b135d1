"""A server in a flood (tests/programs/server_flood.py, briefly), and a control of what it sees."""

from tests.programs import server_flood
from tests.programs.server_flood import Flood, run


def test_idle_connections_leavers_and_unread_streams_stop_nobody(tmp_path):
    said = []
    flood = run(tmp_path, (300, 12, 3), 4, None, say=said.append)
    assert not flood.wrong, said
    assert flood.counts["left"] >= 12 and flood.counts["unread streams"] >= 3
    assert flood.counts["idle connections"] >= 300 and "first tokens" in said[1]


def test_a_refusal_and_an_answer_without_a_word_are_faults(monkeypatch):
    flood = Flood(0)

    class Reply:
        status_code, lines = 503, ["data: {}"]

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def read(self):
            return b"no"

        def iter_lines(self):
            return self.lines

    monkeypatch.setattr(server_flood.httpx, "stream", lambda *where, **how: Reply())
    assert server_flood.first_token(flood, 0) is None and "status 503" in flood.wrong[0]
    Reply.status_code = 200
    assert server_flood.first_token(flood, 0) is None and "without a word" in flood.wrong[1]
    Reply.lines = ['data: {"delta": {"content": "The"}}']
    assert server_flood.first_token(flood, 0) is not None and len(flood.wrong) == 2
