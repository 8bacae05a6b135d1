"""A few hundred mutated model folders (tests/programs/fuzz_folders.py takes more), and that the
fuzzer sees what it is there to see.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.programs import fuzz_folders

ROOT = Path(__file__).resolve().parents[2]
# every fault in a child of its own, forked from a process that has imported the engine
PLANTED = """
import importlib, json, os, sys
import engine.chat.cli
from tests.programs import fuzz_folders
codes = []
for module, name, code in json.loads(sys.argv[1]):
    if not (child := os.fork()):
        body = {}
        exec("import sys\\ndef planted(*arguments, **more):\\n    " + code, body)
        setattr(importlib.import_module(module), name, body["planted"])
        failures, longest, peak = fuzz_folders.run(5, [0, 1, 2, 3], say=False)
        os._exit(10 + len(failures))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print(codes)
"""
FAULTS = (
    ("engine.chat.cli", "run", "raise KeyError('x')"),  # no type
    ("engine.chat.cli", "main", "raise KeyError('x')"),  # a traceback
    ("engine.chat.cli", "run", "import os; os.abort()"),
    ("engine.chat.cli", "run", "bytearray(1 << 31)"),
    (
        "engine.chat.cli",
        "run",
        "from engine.base.errors import EngineError as E; print('error: a', file=sys.stderr); "
        "raise E('b')",
    ),
)


def run(*command):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=540,
    )


def test_mutated_folders_end_in_an_answer_or_in_one_line():
    done = run("-m", "tests.programs.fuzz_folders", "--count", "200", "--seed", "11")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "\n0 failures\n200 folders" in done.stdout


def test_the_fuzzer_finds_what_is_planted():
    done = run("-c", PLANTED, json.dumps(FAULTS))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    # all four cases fail of each fault
    assert json.loads(done.stdout.splitlines()[-1]) == [14] * len(FAULTS), done.stderr[-2000:]


def test_a_case_depends_on_its_number_only(tmp_path):
    sound = fuzz_folders.bases()
    for number in range(12):
        first, again = tmp_path / f"{number}a", tmp_path / f"{number}b"
        said = fuzz_folders.make(3, number, sound, first)
        fuzz_folders.make(4, number, sound, tmp_path / f"{number}c")
        assert said == fuzz_folders.make(3, number, sound, again)
        for path in first.iterdir():
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20:
                assert path.read_bytes() == (again / path.name).read_bytes()
    assert json.loads(sound[0]["config.json"])
