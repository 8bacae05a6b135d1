"""Replicas under Ray Serve, where Ray is installed (pip install '.[ray]'): tests/programs has the
program, docs/PARALLEL.md what it said.
"""

import subprocess
import sys

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install '.[ray]'")

from engine.base.errors import UsageError
from engine.fleet.ray_serve import _figures, _forgotten, application
from tests.builders import ROOT


def test_second_questions_find_their_document_and_a_kill_is_survived():
    command = [sys.executable, "-m", "tests.programs.ray_replicas", "--rounds", "2"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "by prefixes: 16 of 16" in found.stdout and "8 of 8 answered" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"replica": 2}, "replica: no such argument"),
        ({"replicas": 0}, "replicas: found 0"),
        ({"cpus": "many"}, "cpus: found 'many'"),
        ({"flags": "--plan"}, "--plan"),
        ({"flags": "--slots 0"}, "--slots"),
    ],
)
def test_bad_arguments_are_refused_in_a_line(arguments, words):
    with pytest.raises(UsageError, match=words) as caught:
        application(arguments)
    assert "\n" not in str(caught.value)


def test_figures_of_replicas_stand_together_and_are_told_apart():
    one = b'# HELP a_total x\n# TYPE a_total counter\na_total{path="/"} 3\n# HELP b y\nb 1\n'
    text = _figures({"r1": (200, one), "r2": (200, one.replace(b" 3", b" 4"))}).body.decode()
    assert text == (
        "# HELP a_total x\n# TYPE a_total counter\n"
        'a_total{replica="r1",path="/"} 3\na_total{replica="r2",path="/"} 4\n'
        '# HELP b y\nb{replica="r1"} 1\nb{replica="r2"} 1\n'
    )
    assert _figures({"r1": (401, b"{}")}).status_code == 401


def test_what_is_forgotten_is_summed():
    done = b'{"sessions": 2, "blocks": 1}'
    assert _forgotten({"a": (200, done), "b": (200, done)}).body == b'{"sessions":4,"blocks":2}'
    assert _forgotten({"a": (200, done), "b": (400, b"{}")}).status_code == 400
