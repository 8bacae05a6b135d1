"""`make test`: the whole suite, a process per core; `make quick`: a minute of it; `make
studies-test`: the tests of tools/studies, which neither runs. The last line is one pytest summary.

Two runs follow each other, because TRITON_INTERPRET is read once, when triton is imported: the
interpreter's tests (tests/kernels) need it set, the rest needs it unset. Each run deals its tests
to workers (pytest-xdist). Arguments go to every pytest run, except that paths replace the
suite: `tests/run.py tests/engine/text/test_text.py -x -n 0`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_TESTS_COLLECTED = 5  # pytest's exit status; right where triton or a folder is absent
INTERPRETED = "tests/kernels"
STUDIES = "tests/studies"  # `make studies-test` runs them
WORKER_BYTES = 3 * 10**9  # what a worker may need: resident memory of up to 2 GB was seen
MOST_WORKERS = 8


@dataclass
class Run:
    """One pytest run: its arguments and environment, then its exit status, counts and failures."""

    name: str
    arguments: list[str]
    interpret: bool = False
    status: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def execute(self, options: list[str], report: Path) -> None:
        """Run pytest to its end; an unreadable report (a crash) counts as one error."""
        settings = {"OMP_NUM_THREADS": "1", "TRITON_INTERPRET": str(int(self.interpret))}
        command = [sys.executable, "-m", "pytest", f"--junitxml={report}", "--color=no"]
        command += ["--durations=8", *workers(), *self.arguments, *options]
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **settings},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            assert process.stdout is not None
            # as it comes: a run that is stopped has shown how far it was
            for line in process.stdout:
                print(f"[{self.name}] {line.rstrip()}", flush=True)
        self.status = process.returncode
        self.counts, self.failures = read_counts(report), read_failures(report)


def workers() -> list[str]:
    """Pytest's options: a worker per core that memory has room for, two at least, each with a part
    of the files in their order: what a file makes once is made once.
    """
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        count = min(count, total // WORKER_BYTES)
    return ["-n", str(max(2, min(count, MOST_WORKERS))), "--dist", "worksteal"]


def read_counts(report: Path) -> dict[str, int]:
    """passed, failed, errors and skipped of a junit report."""
    try:
        suite = ElementTree.parse(report).getroot().find("testsuite")
        assert suite is not None
        tests, failed, errors, skipped = (
            int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")
        )
    except (OSError, ElementTree.ParseError, AssertionError):
        return {"errors": 1}
    return {
        "failed": failed,
        "passed": tests - failed - errors - skipped,
        "skipped": skipped,
        "errors": errors,
    }


def read_failures(report: Path) -> list[str]:
    """A line for each failed test of a junit report: `classname::name: message`, 240 characters."""
    try:
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return [f"no report in {report.name}: pytest stopped before its end"]
    found = []
    for case in cases:
        for fault in (*case.findall("failure"), *case.findall("error")):
            words = " ".join(fault.get("message", "").split())
            found.append(f"{case.get('classname')}::{case.get('name')}: {words}"[:240])
    return found


def suite() -> list[Run]:
    """Every test but those of the studies."""
    rest = Run("engine", ["tests", f"--ignore={INTERPRETED}", f"--ignore={STUDIES}"])
    if not (ROOT / INTERPRETED).is_dir():
        return [rest]
    return [rest, Run("kernels", [INTERPRETED], interpret=True)]


def quick() -> list[Run]:
    """The files of tests/quick.py; tests/conftest.py leaves out what it does not sample."""
    from quick import QUICK

    return [Run("quick", ["--quick", *QUICK])]


def main(arguments: list[str]) -> int:
    """Run everything and end with one line that adds it up."""
    start = time.monotonic()
    paths = [a for a in arguments if not a.startswith("-") and (ROOT / a.split("::")[0]).exists()]
    short = "--quick" in arguments
    options = [a for a in arguments if a not in paths and a != "--quick"]
    runs = [Run("chosen", paths)] if paths else quick() if short else suite()
    with tempfile.TemporaryDirectory() as folder:
        for number, run in enumerate(runs):
            run.execute(options, Path(folder) / f"{number}.xml")
    failed = [run for run in runs if run.status not in (0, NO_TESTS_COLLECTED)]
    for run in failed:
        # named once more at the end: a log is often read by its last lines alone
        print(f"FAILED RUN: {run.name} (exit status {run.status})", *run.failures, sep="\n  ")
    if short and not paths:
        from quick import left_out

        print(left_out(ROOT))
    keys = ("failed", "passed", "skipped", "errors")
    total = {key: sum(run.counts.get(key, 0) for run in runs) for key in keys}
    words = ", ".join(f"{count} {key}" for key, count in total.items() if count) or "no tests ran"
    print(f"===== {words} in {time.monotonic() - start:.2f}s =====")
    return 1 if failed or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
