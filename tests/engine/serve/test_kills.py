"""A server that is killed in the middle leaves its cache whole (tests/programs/server_kills.py,
briefly).
"""

from tests.programs.server_kills import kill, start, whole


def test_a_killed_server_leaves_nothing_wrong(tmp_path):
    run = kill(tmp_path, 1, 3, say=lambda line: None)
    # the next one starts on what is there
    process, _ = start(run.folder, tmp_path / "log")
    process.kill()
    process.wait()
    assert whole(run.folder) >= 0 and "cache:" not in (tmp_path / "log").read_text()
