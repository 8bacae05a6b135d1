"""A sample of the terminal matrix; `python -m tests.programs.terminal_matrix` is all of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pty", reason="pseudo-terminals are a Unix thing")
ROOT = Path(__file__).resolve().parents[2]
SAMPLE = (
    "pty:command:Ctrl-C",
    "pty:read:SIGTERM",
    "pipe:command:SIGHUP",
    "no stdout:load:nothing",
)
CODES = {"Ctrl-C": (0, 130), "Ctrl-C twice": (0, 130), "SIGTERM": (143,), "SIGHUP": (129,)}


def test_every_end_is_clean():
    """All cells in children of one process: it imports the engine once."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.terminal_matrix", "--only", *SAMPLE],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    clean = f"{len(SAMPLE)} cells, 0 not clean" in done.stdout
    assert done.returncode == 0 and clean, done.stdout + done.stderr
    found = [line.rsplit(maxsplit=2) for line in done.stdout.splitlines()[: len(SAMPLE)]]
    assert {cell for cell, _, _ in found} == {*SAMPLE}
    for cell, code, _ in found:
        assert int(code) in CODES.get(cell.rsplit(":", 1)[1], (1,)), cell
