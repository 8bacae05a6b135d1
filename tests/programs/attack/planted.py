"""Does the random test notice? Plants one bug at a time and attacks until it is found.

python -m tests.programs.attack.planted [--minutes 10] [--only WORDS ...]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.programs.breakages import ROOT, Breakage, break_tree, copy_tree

BUGS = (
    Breakage(
        "a switch chooses by queries that a truncate has left behind",
        "engine/runner/prompt.py",
        r"have_queries\(session, runner, needs\.prompt_window\)",
        "pass",
        (),
    ),
    Breakage(
        "an interrupted commit is taken for whole",
        "engine/runner/rollback.py",
        r"    if session\.inconsistent:\n        invalidate\(session, n\)",
        "    session.made_whole()",
        (),
    ),
    Breakage(
        "check leaves the rows of its last step",
        "engine/base/interrupts.py",
        r"complete\(restore\)",
        "pass",
        (),
    ),
    Breakage(
        "a fork forgets the prompt that was to go on",
        "engine/methods/evict/shared/runtime.py",
        r"self\.reading, self\.total = other\.reading, other\.total",
        "pass",
        (),
    ),
    Breakage(
        "an answer belongs to the thread of its first piece",
        "engine/base/lock.py",
        r"if not nested and \(request is None or request not in lock\._answers\):",
        "if not nested:",
        (),
    ),
)

# of sessions of a batch
BATCH_BUGS = (
    Breakage(
        "a step of a batch runs over a state that an interrupt tore",
        "engine/batch/stepping.py",
        r"    replay\(session\)  # an interrupt.*\n",
        "",
        (),
    ),
    Breakage(
        "a token is kept without its logits",
        "engine/runner/state.py",
        r"self\.last_logits, self\.selected = logits, selected",
        "self.selected = selected",
        (),
    ),
    Breakage(
        "an answer that is stopped leaves its token fed",
        "engine/batch/scheduler.py",
        r"self\._take_back\(task\.session\)",
        "pass",
        (),
    ),
)


def found(root: Path, minutes: float, seed: int, batch: bool) -> tuple[bool, str]:
    """(whether the attack failed, its last lines) in a copy of the tree."""
    command = [
        sys.executable,
        "-m",
        "tests.programs.attack",
        "--minutes",
        str(minutes),
        "--seed",
        str(seed),
    ]
    command += ["--batch"] if batch else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    return done.returncode == 1 and "failures" in done.stdout, done.stdout


def main(arguments: list[str] | None = None) -> int:
    """Print one line per bug; 1 where one was not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.programs.attack.planted")
    parser.add_argument("--minutes", type=float, default=10, help="for one bug")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="names that hold one of these")
    chosen = parser.parse_args(arguments)
    missed = 0
    for bug in (*BUGS, *BATCH_BUGS):
        if chosen.only and not any(words in bug.name for words in chosen.only):
            continue
        with tempfile.TemporaryDirectory() as folder:
            copy_tree(ROOT, Path(folder))
            break_tree(Path(folder), bug)
            began = time.monotonic()
            noticed, output = found(Path(folder), chosen.minutes, chosen.seed, bug in BATCH_BUGS)
            spent = time.monotonic() - began
        missed += not noticed
        seed = re.search(r"^seed (\d+: .*)", output, re.MULTILINE)
        words = f"found in {spent:.0f} s, seed {seed[1]}" if noticed and seed else "NOT FOUND"
        print(f"{bug.name}: {words}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
