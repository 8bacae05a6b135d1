"""`make test`: the whole suite in the processes it needs, two at a time; the last line is one
pytest summary.

Three processes, because TRITON_INTERPRET is read once, when triton is imported: the interpreter
tests (tests/kernels) need it set and the ahead-of-time compile tests (tests/aot) need it unset. The
engine's tests run beside those two. Arguments go to every pytest run, except that paths replace the
suite: `tests/run.py tests/engine/text/test_text.py -x`.
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_TESTS_COLLECTED = 5  # pytest's exit status; right where triton or a folder is absent


@dataclass
class Run:
    """One pytest process: its paths and environment, then its exit status and counts."""

    name: str
    paths: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    status: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def execute(self, options: list[str], report: Path) -> None:
        """Run pytest to its end; an unreadable report (a crash) counts as one error."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **self.environment}
        command = [
            sys.executable,
            "-m",
            "pytest",
            f"--junitxml={report}",
            "--color=no",
            "--durations=8",
            *self.paths,
            *options,
        ]
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process:
            # as it comes: a run that is stopped has shown how far it was
            for line in process.stdout:
                print(f"[{self.name}] {line.rstrip()}", flush=True)
        self.status, self.counts = process.returncode, read_counts(report)


def read_counts(report: Path) -> dict[str, int]:
    """passed, failed, errors and skipped of a junit report."""
    try:
        suite = ElementTree.parse(report).getroot().find("testsuite")
        tests, failed, errors, skipped = (
            int(suite.get(key, 0)) for key in ("tests", "failures", "errors", "skipped")
        )
    except (OSError, ElementTree.ParseError, AttributeError):
        return {"errors": 1}
    return {
        "failed": failed,
        "passed": tests - failed - errors - skipped,
        "skipped": skipped,
        "errors": errors,
    }


def suite() -> list[list[Run]]:
    """Two lanes for two cores; the runs of a lane follow each other."""
    apart = [name for name in ("tests/kernels", "tests/aot") if (ROOT / name).is_dir()]
    lanes = [
        [
            Run(
                "engine",
                ["tests", *(f"--ignore={name}" for name in apart)],
                {"TRITON_INTERPRET": "0"},
            )
        ],
        [],
    ]
    if "tests/kernels" in apart:
        lanes[1].append(Run("kernels", ["tests/kernels"], {"TRITON_INTERPRET": "1"}))
    if "tests/aot" in apart:
        lanes[1].append(Run("compile", ["tests/aot"], {"TRITON_INTERPRET": "0"}))
    return lanes


def main(arguments: list[str]) -> int:
    """Run everything and end with one line that adds it up."""
    start = time.monotonic()
    paths = [a for a in arguments if not a.startswith("-") and (ROOT / a.split("::")[0]).exists()]
    options = [a for a in arguments if a not in paths]
    lanes = [[Run("chosen", paths)]] if paths else suite()
    with tempfile.TemporaryDirectory() as folder:

        def drive(number: int) -> None:
            for index, run in enumerate(lanes[number]):
                run.execute(options, Path(folder) / f"{number}-{index}.xml")

        threads = [threading.Thread(target=drive, args=(number,)) for number in range(len(lanes))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    runs = [run for lane in lanes for run in lane]
    failed = [run for run in runs if run.status not in (0, NO_TESTS_COLLECTED)]
    for run in failed:
        print(f"FAILED RUN: {run.name} (exit status {run.status})")
    total = {
        key: sum(run.counts.get(key, 0) for run in runs)
        for key in ("failed", "passed", "skipped", "errors")
    }
    words = ", ".join(f"{count} {key}" for key, count in total.items() if count) or "no tests ran"
    print(f"===== {words} in {time.monotonic() - start:.2f}s =====")
    return 1 if failed or not total["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
