"""`python -m tools.arm` (`make test-arm`): make the emulated machine and run tests on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from engine.base.errors import EngineError
from kernels.launch.isa import ARM_SETS
from tools.arm.machine import ROOT, make, place, require_programs
from tools.common.arguments import command
from tools.common.program import guarded, say

# a sanitizer's shadow memory lies where the emulator has the program
LEFT_OUT = "tests/kernels_cpu/test_sources.py::test_sanitizers_find_nothing"


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 (a test failed, or a part of the machine did not come), 2 (usage), 130."""
    flags = command(
        "python -m tools.arm",
        "Make an ARM that QEMU emulates (5 GB, once: torch for ARM comes with CUDA's libraries) "
        "and run tests on it. Needs Debian's qemu-user-static and g++-aarch64-linux-gnu. A run "
        "that was stopped goes on: a test that has passed is not run again as long as no source "
        "changes.",
    )
    flags.add_argument("--folder", type=Path, help="where the machine lies (default: user's cache)")
    flags.add_argument(
        "--set",
        choices=ARM_SETS,
        default=ARM_SETS[-1],
        help=f"the instruction set that it has (default: {ARM_SETS[-1]})",
    )
    flags.add_argument("--again", action="store_true", help="run tests that have passed too")
    flags.add_argument("--only-make", action="store_true", help="run no test")
    flags.add_argument("-k", metavar="NAMES", help="only tests of these names, as pytest's -k")
    flags.add_argument("tests", nargs="*", help="of pytest (default: tests/kernels_cpu)")
    args = flags.parse_args(argv)

    def work() -> None:
        require_programs()
        folder = (args.folder or place()).resolve()
        python = make(folder)
        if not args.only_make:
            tests = args.tests or ["tests/kernels_cpu"]
            tests += ["-k", args.k] if args.k else []
            run(python, folder, args.set, tests, args.again)

    return guarded(work, "stopped; the same command goes on from here")


def run(python: Path, folder: Path, name: str, tests: Sequence[str], again: bool) -> None:
    """Run tests on the machine and print how many passed. Raises EngineError where one fails."""
    results = folder / f"results-{name}.jsonl"
    if again:
        results.unlink(missing_ok=True)
    state = {
        "OMNIKV_ARM": name,
        "OMNIKV_ARM_RESULTS": str(results),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    plugins = ["-p", "tools.arm.record", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options = ["-q", "--tb=short", "--deselect", LEFT_OUT]
    done = subprocess.run(
        [str(python), "-m", "pytest", *plugins, *options, *tests],
        cwd=ROOT,
        env={**os.environ, **state},
    )
    found = count(results)
    said = ", ".join(f"{number} {outcome}" for outcome, number in sorted(found.items()))
    print(f"{name}: {said or 'no test ran'}")
    if done.returncode not in (0, 5) or found["failed"]:  # 5: every test has passed before
        raise EngineError(f"{results}: tests failed on {name} (pytest exits {done.returncode})")
    say("all of them as on the machine's own processor")


def count(results: Path) -> Counter[str]:
    """How many tests have each outcome, the last of each test."""
    last: dict[str, str] = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else ():
        record = json.loads(line)
        last[record["test"]] = record["outcome"]
    return Counter(last.values())


if __name__ == "__main__":
    sys.exit(main())
