"""The Dockerfile, by rules of our own: no engine builds it here.

Stops: a flag or a program that is not there, a container of root's, a layer with a package list in
it, a context that sends the clone's .venv, an extra that pyproject.toml does not have.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from engine.base.errors import UsageError
from engine.serve.flags import keys_of, parser
from tests.programs.lowest import tomllib
from tools.release.wheel import FILES, PARTS

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "Dockerfile"
KNOWN = {"FROM", "ARG", "RUN", "COPY", "USER", "WORKDIR", "EXPOSE", "ENTRYPOINT"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def instructions(text: str) -> list[tuple[str, str]]:
    """(instruction, arguments), continued lines joined and comments left out."""
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(line.split()[0], line.split(None, 1)[1]) for line in joined.splitlines() if line]


def faults(text: str) -> list[str]:
    """What is wrong with a Dockerfile."""
    steps = instructions(text)
    found = [f"unknown instruction {name}" for name, _ in steps if name not in KNOWN]
    if not re.match(r"python:3\.\d+-slim$", dict(steps)["FROM"]):
        found.append("FROM: expected python:3.N-slim, a tag that stays")
    for name, rest in steps:
        if name != "RUN":
            continue
        for command in rest.split("&&"):
            words = command.split()
            if words[:2] == ["apt-get", "install"] and "--no-install-recommends" not in words:
                found.append("apt-get install without --no-install-recommends")
            if "pip" in words and not {"--no-cache-dir", "--no-cache"} & set(words):
                found.append(f"{words[0]} keeps its cache")
            if words[:2] == ["pip", "install"] and not all(
                "==" in w for w in words[2:] if not w.startswith("-")
            ):
                found.append("pip install without a version")
        if "apt-get install" in rest and "rm -rf /var/lib/apt/lists/*" not in rest:
            found.append("apt-get leaves its lists in the layer")
    if dict(steps).get("USER", "root") in ("root", "0"):
        found.append("it runs as root")
    return found


TEXT = FILE.read_text(encoding="utf-8")


def test_the_dockerfile_keeps_the_rules():
    assert faults(TEXT) == [] and len(TEXT.splitlines()) < 20


@pytest.mark.parametrize(
    "old, new, fault",
    [
        ("3.11-slim", "latest", "FROM"),
        ("--no-install-recommends ", "", "without --no-install"),
        ("rm -rf /var/lib/apt/lists/* && ", "", "lists"),
        ("--no-cache-dir ", "", "keeps its cache"),
        ("uv==0.13.9", "uv", "without a version"),
        ("USER 1000\n", "", "root"),
        ("COPY", "ADD", "unknown instruction ADD"),
    ],
)
def test_each_rule_notices(old, new, fault):
    assert old in TEXT and any(fault in line for line in faults(TEXT.replace(old, new)))


def test_its_programs_flags_and_port_are_there():
    words = json.loads(dict(instructions(TEXT))["ENTRYPOINT"])
    assert words[0] in PROJECT["scripts"]
    shown = parser().format_help()
    assert all(word in shown for word in words[1:] if word.startswith("--"))
    port = dict(instructions(TEXT))["EXPOSE"]
    assert f"(default {port})" in shown and f"-p {port}:{port} -e OMNIKV_API_KEY=" in TEXT


def test_a_container_without_a_key_says_so():
    words = json.loads(dict(instructions(TEXT))["ENTRYPOINT"])
    with pytest.raises(UsageError, match="without a key"):
        keys_of(parser().parse_args(words[1:]))


def test_its_extras_are_the_projects():
    (extras,) = re.findall(r'"/source\[([\w,]+)\]"', TEXT)
    assert set(extras.split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_context_has_what_a_wheel_is_made_of_and_no_environment():
    left_out = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert {".git", ".venv"} <= set(left_out)
    assert not [
        name for name in (*PARTS, *FILES) for rule in left_out if fnmatch.fnmatch(name, rule)
    ]


def test_uv_has_the_flags():
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("no uv here")
    shown = subprocess.run([uv, "pip", "install", "--help"], capture_output=True, text=True).stdout
    assert all(flag in shown for flag in ("--system", "--no-cache", "--torch-backend"))
    assert "auto, cpu, cu" in shown and "cu130" in shown


def test_hadolint_finds_nothing():
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("no hadolint here")
    found = subprocess.run([hadolint, str(FILE)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
