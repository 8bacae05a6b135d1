"""The programs that measure the server and what comes back from disk, briefly.

Stops: a program that no longer runs, a table that lacks a way, a server that answers less than it
was asked for and counts all the same.
"""

import json

import pytest

pytest.importorskip("starlette")

from engine import LLM
from engine.base.errors import EngineError
from tests.builders import POCKET
from tests.engine.serve.conftest import serving
from tools.speed import clients, saved


def test_saved_and_cached_rows_beside_plain_reading(tmp_path, capsys):
    flags = f"--shape tiny --tokens 600 --turns 1 --folder {tmp_path} --json {tmp_path}/r.json"
    assert saved.main(flags.split()) == 0
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(row["what"], row["state"]) for row in rows] == [
        (what, state) for what in ("session", "cache") for state in ("cold", "warm")
    ]
    assert all(row["ratio"] > 0 for row in rows) and "| cache | warm |" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]  # it left nothing behind
    assert saved.main(["--tokens", "100"]) == 2


def test_two_servers_under_the_same_clients(tmp_path, monkeypatch):
    llm = LLM(str(POCKET), max_context=256, threads=1, load=False)
    with serving(llm, slots=2) as server:
        url = f"{server.url}/v1"
        flags = f"--clients 2 --words 4 --tokens 2 --turns 1 --json {tmp_path}/r.json"
        assert clients.main([f"one={url}", f"other={url}", *flags.split()]) == 0
        found = json.loads((tmp_path / "r.json").read_text())["tokens_per_second"]
        assert {name: sorted(kinds) for name, kinds in found.items()} == {
            "one": ["held", "new"],
            "other": ["held", "new"],
        }
        assert server.worker.metrics.cached_tokens > 0
        monkeypatch.setattr(clients, "ask", lambda *a: {"completion_tokens": 1})
        with pytest.raises(EngineError, match="2 tokens, expected 2 from each of 2"):
            clients.turn(url, ["a", "b"], 2)
    assert clients.main(["one=https://example.org"]) == 2
