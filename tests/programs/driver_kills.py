"""Kill a measurement in the middle of anything, again and again, and let it go on each time.

python -m tests.programs.driver_kills --kills 20 --seed 0 --driver suites

The same command runs once without a stop and once in pieces: each piece is killed (SIGKILL) when it
has added a random number of lines to its records and a random time has passed, so that kills fall
into loading, reading, answering and writing. The last piece runs to its end. Both must have the
same records, but for times, and the same report. Exit code 0, or 1 with a line that says what
differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.builders import ROOT

SECONDS = 300  # that a piece may take until it has added its lines


@dataclass(frozen=True)
class Driver:
    """A program that keeps records. names: of records and report in its folder."""

    command: str
    records: str = "answers.jsonl"
    report: str = "report.md"


COMMON = "--model pocket --dtype float32 --threads 1"
DRIVERS = {
    "suites": Driver(
        "tools.suites --tasks niah_single_1 niah_multikey_1 fwe graphwalks --lengths 1300 "
        f"--samples 6 --methods omnikv@6.67 snapkv@30 {COMMON}"
    ),
    "compare": Driver(
        "tools.compare --methods omnikv@6.67 h2o@30 --tasks passkey kv --lengths 512 --answers 8 "
        f"--questions 1 {COMMON}"
    ),
    "fidelity": Driver(
        "tools.fidelity --methods omnikv@6.67 quest@30 h2o@30 --filters published --waits 0 "
        f"--lengths 300 --texts 6 --positions 4 --answer 4 {COMMON}",
        "records.jsonl",
    ),
}
TIMES = re.compile("seconds|cpu|load|peak")  # names of a record's values that no two runs share
# lines of a report, and columns of its tables
MOVING = re.compile(r"^- (load|machine|commit|.*commit )|seconds|\bms\b| --out ")
TIMED = re.compile(r"\bms\b|\bs$|seconds|^peak$")


def start(driver: Driver, out: Path) -> subprocess.Popen[bytes]:
    """The program, beginning or going on in a folder."""
    command = [sys.executable, "-m", *driver.command.split(), "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(out.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment)


def lines(path: Path) -> int:
    """How many lines a file has, 0 where there is none yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def records(path: Path) -> dict[str, int]:
    """Each record without its times, and how often it is there."""
    found: dict[str, int] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError:
            continue  # a kill's half line, which a later piece leaves out or has written again
        if "settings" not in record:
            kept = {key: value for key, value in record.items() if not TIMES.search(key)}
            text = json.dumps(kept, sort_keys=True)
            found[text] = found.get(text, 0) + 1
    return found


def said(path: Path) -> list[str]:
    """A report's lines but for those that name times, the load, the commit and the folder, and its
    tables but for their columns of times.
    """
    found: list[str] = []
    timed: list[int] | None = None  # columns of the table that the lines are in; None: in none
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            timed = None
            found += [] if MOVING.search(line) else [line]
            continue
        cells = line.split("|")
        if timed is None:
            timed = [i for i, cell in enumerate(cells) if TIMED.search(cell.strip())]
        found.append("|".join(cell for i, cell in enumerate(cells) if i not in timed))
    return found


def kill(driver: Driver, folder: Path, kills: int, seed: int, say=print) -> str | None:
    """Run both; None, or what differs."""
    rng, whole, parts = random.Random(seed), folder / "whole", folder / "parts"
    if start(driver, whole).wait():
        return f"the run without a stop ended badly: {whole.with_suffix('.log').read_text()[-400:]}"
    total = lines(whole / driver.records)
    for number in range(kills):
        process, there = start(driver, parts), lines(parts / driver.records)
        more = rng.choice((0, 0, 1, 2)) if there < total - 3 else 0
        end = time.monotonic() + SECONDS
        while lines(parts / driver.records) < there + more and process.poll() is None:
            if time.monotonic() > end:
                process.kill()
                return f"a piece added no line in {SECONDS} seconds"
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 1.0 if more else 5.0))
        process.send_signal(signal.SIGKILL)
        code = process.wait()
        say(f"kill {number + 1}: {there} to {lines(parts / driver.records)} lines of {total}")
        if code not in (0, -signal.SIGKILL):
            return f"a piece ended badly: {parts.with_suffix('.log').read_text()[-400:]}"
    if start(driver, parts).wait():
        return f"the last piece ended badly: {parts.with_suffix('.log').read_text()[-400:]}"
    return differing(driver, whole, parts)


def differing(driver: Driver, whole: Path, parts: Path) -> str | None:
    """What differs between the two folders, None: nothing."""
    a, b = (records(path / driver.records) for path in (whole, parts))
    if a != b:
        odd = [text for text in {**a, **b} if a.get(text) != b.get(text)]
        return f"{len(odd)} records differ, the first: {odd[0][:300]}"
    a, b = (said(path / driver.report) for path in (whole, parts))
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if x != y]
    if pairs or len(a) != len(b):
        return f"reports differ ({len(a)} and {len(b)} lines), first: {pairs[:1]}"
    return None


def main() -> int:
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--driver", choices=DRIVERS, default="suites")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        driver = DRIVERS[args.driver]
        wrong = kill(driver, Path(folder), args.kills, args.seed)
        if wrong:
            print(f"error: {args.driver}, seed {args.seed}: {wrong}", file=sys.stderr)
            return 1
    print(f"{args.driver}: killed {args.kills} times, records and report are those of one run")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
