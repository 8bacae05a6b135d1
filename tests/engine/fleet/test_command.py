"""python -m engine.fleet: what it says before Ray starts, with Ray and without."""

import sys

import pytest

from engine.fleet.__main__ import main


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--replicas 0", "replicas: found '0'"),
        ("--router up", "router: found 'up'"),
        ("--slots 0", "--slots"),
        ("--model /nowhere", "/nowhere"),
        ("--plan", "--plan"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(flags, words, capsys):
    pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")
    assert main(flags.split()) == 2
    said = capsys.readouterr().err
    assert words in said and said.startswith("error: ") and said.count("\n") == 1


def test_without_ray_a_line_names_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["--replicas", "2"]) == 2
    assert capsys.readouterr().err == "error: replicas need ray: pip install 'ray[serve]'\n"


def test_the_flags_are_the_servers_and_its_own(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert all(flag in said for flag in ("--replicas", "--router", "--ctx", "--slots", "--port"))
