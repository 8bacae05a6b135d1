"""A sample of the terminal matrix; `python -m tests.terminal_matrix` is all of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pty", reason="pseudo-terminals are a Unix thing")
ROOT = Path(__file__).resolve().parents[1]
SAMPLE = (
    "pty:command:Ctrl-C",
    "pty:read:SIGTERM",
    "pipe:command:SIGHUP",
    "no stdout:load:nothing",
)
CODES = {"Ctrl-C": (0, 130), "Ctrl-C twice": (0, 130), "SIGTERM": (143,), "SIGHUP": (129,)}


@pytest.mark.parametrize("cell", SAMPLE)
def test_every_end_is_clean(cell):
    done = subprocess.run(
        [sys.executable, "-m", "tests.terminal_matrix", "--only", cell],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and "1 cells, 0 not clean" in done.stdout, done.stdout + done.stderr
    code = int(done.stdout.splitlines()[0].split()[-2])
    assert code in CODES.get(cell.rsplit(":", 1)[1], (1,))
