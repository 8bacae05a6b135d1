"""Ctrl-C while a program is imported ends it with 130 and says nothing; later it is the
KeyboardInterrupt that cleans up, without a traceback.

Stops: fifty lines of torch's imports, `finally` blocks that do not run.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
INTERRUPTED = (
    "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nraise SystemExit('went on')\n"
)
PROGRAMS = sorted(
    [f"tools.{file.parent.name}" for file in ROOT.glob("tools/*/__main__.py")]
    + [
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in [*ROOT.glob("tools/*.py"), *ROOT.glob("tools/*/[a-z]*.py")]
        if "\nif __name__" in (text := file.read_text()) and "import torch" in text
    ]
    + ["engine.serve"]
)


def run(module, path, folder=ROOT):
    found = subprocess.run(
        [sys.executable, "-m", module],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=60,
        # a suite that runs in the background hands its ignored signals down
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    return found.returncode, found.stdout, found.stderr


@pytest.mark.parametrize("module", PROGRAMS)
def test_while_it_imports(tmp_path, module):
    (tmp_path / "torch.py").write_text(INTERRUPTED)
    assert run(module, tmp_path) == (130, "", "")


def test_once_it_runs(tmp_path):
    package = tmp_path / "program"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from engine.terminal.sigint import leave_quietly\nleave_quietly('program')\n"
    )
    (package / "__main__.py").write_text(
        "def main():\n    try:\n        import late\n    finally:\n        print('kept')\nmain()\n"
    )
    (tmp_path / "late.py").write_text(INTERRUPTED)
    assert run("program", tmp_path) == (-signal.SIGINT, "kept\n", "")
