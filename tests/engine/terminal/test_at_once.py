"""What needs no engine is answered without torch, which takes seconds to import.

Stops: a version that is there after ten seconds, in the clone or by an installed program's name.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.base.version import VERSION

ROOT = Path(__file__).resolve().parents[3]
ASKED = [
    ("chat", "--version", f"omnikv-engine {VERSION} (python "),
    ("chat", "--help", "usage: python -m engine.chat"),
    ("chat", "--list-models", "llama-3-8b-262k"),
    ("serve", "--version", f"omnikv-engine {VERSION} (python "),
    ("serve", "--help", "usage: python -m engine.serve"),
]


def scripts():
    """{program: (module, function)} as pyproject.toml names them."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    return {
        name: (module, function)
        for name, module, function in re.findall(r'^omnikv-(\w+) = "([\w.]+):(\w+)"', text, re.M)
    }


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("program, flag, said", ASKED)
def test_it_needs_no_torch(tmp_path, program, flag, said, installed):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    started = ["-m", f"engine.{program}"]
    if installed:
        module, function = scripts()[program]
        code = f"import sys\nfrom {module} import {function}\nsys.exit({function}())"
        started = ["-c", code]
    done = subprocess.run(
        [sys.executable, *started, flag],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "") and said in done.stdout


def test_what_needs_the_engine_imports_it(tmp_path):
    """Or the stand-in for torch above would stop nothing."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    done = subprocess.run(
        [sys.executable, "-m", "engine.chat", "--plan"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "torch was imported" in done.stderr
