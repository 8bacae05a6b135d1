"""`make` on a fresh machine: the venv knows its clone, and pip is neither silent nor a flood.

Stops: an engine that `.venv/bin/python` finds in the clone's folder only, minutes without a line, a
failed installation that counts as done.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PIP = """#!/bin/sh
echo 'Collecting numpy==2.4.6'
echo '  Downloading numpy-2.4.6-cp311-cp311-manylinux_2_27_x86_64.whl.metadata (6.6 kB)'
echo 'Downloading numpy-2.4.6-cp311-cp311-manylinux_2_27_x86_64.whl (16.6 MB)'
echo 'Using cached torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (191.8 MB)'
echo 'Installing collected packages: numpy, torch'
exit $FAILS
"""
PYTHON = """#!/bin/sh
if [ "$2" = venv ]; then exec "{python}" -m venv --without-pip "$3"; fi
exec "{python}" "$@"
"""
pytestmark = pytest.mark.skipif(
    not shutil.which("make") or os.name != "posix", reason="wants make and a POSIX shell"
)


@pytest.fixture
def clone(tmp_path):
    """A folder with our Makefile, a small engine, and a pip that says what pip says."""
    clone = tmp_path / "a clone"
    for name in ("engine", "kernels"):
        (clone / name).mkdir(parents=True)
        (clone / name / "__init__.py").write_text("")
    (clone / "engine" / "__main__.py").write_text("import kernels; print(kernels.__file__)\n")
    shutil.copy(ROOT / "Makefile", clone)
    (clone / "requirements.txt").write_text("")
    for name, text in (("pip", PIP), ("python", PYTHON.format(python=sys.executable))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return clone


def make(clone, target, fails=0):
    """Make a target with the stand-ins for pip and python."""
    home = clone.parent
    command = ["make", "-C", str(clone), f"PIP={home / 'pip'}", f"PYTHON={home / 'python'}", target]
    state = {**os.environ, "FAILS": str(fails)}
    return subprocess.run(command, env=state, capture_output=True, text=True)


def test_the_venv_knows_its_clone_and_moves_with_it(clone, tmp_path):
    assert make(clone, ".venv/bin/python").returncode == 0
    moved = tmp_path / "moved"
    for folder in (clone, moved):
        if folder is moved:
            clone.rename(moved)
        state = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        done = subprocess.run(
            [str(folder / ".venv/bin/python"), "-m", "engine"],
            cwd="/",
            env=state,
            capture_output=True,
            text=True,
        )
        assert done.stdout.strip() == str(folder / "kernels" / "__init__.py"), done.stderr


def test_an_installation_says_what_it_takes_and_shows_the_large_packages(clone):
    done = make(clone, ".venv/.runtime")
    assert done.returncode == 0 and (clone / ".venv" / ".runtime").is_file()
    said = done.stderr
    assert "GB of disk" in said and said.index("GB of disk") < said.index("numpy")
    assert "numpy-2.4.6" in said and "(16.6 MB)" in said and "(191.8 MB)" in said
    assert "Installing collected packages: numpy, torch" in said
    assert "metadata" not in said and "Collecting" not in said


def test_an_installation_that_fails_is_not_done(clone):
    assert make(clone, ".venv/.runtime", fails=1).returncode != 0
    assert not (clone / ".venv" / ".runtime").exists()
    assert make(clone, ".venv/.runtime").returncode == 0
