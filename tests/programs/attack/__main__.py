"""python -m tests.programs.attack: run sequences until the time is over; shrink what fails."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from tests.programs.attack import batch, sequence
from tests.programs.attack.batch import BatchCounts, BatchSequence
from tests.programs.attack.sequence import Counts, Operation, Sequence


class Kind(NamedTuple):
    """What a sequence is made of. llms: those that it keeps."""

    made: Callable[[int], Any]
    operations: Callable[[int], list[Operation]]
    counts: type
    llms: dict


ALONE = Kind(Sequence, sequence.operations, Counts, sequence.LLMS)
BATCH = Kind(BatchSequence, batch.operations, BatchCounts, batch.LLMS)


def failure(seed: int, todo: list[Operation], counts: Any = None, kind: Kind = ALONE) -> str | None:
    """What goes wrong in a sequence: one line; None where nothing does."""
    made = kind.made(seed)
    try:
        made.run(todo)
    except Exception as error:
        kind.llms.clear()  # an LLM that was left busy would spoil what follows
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        failure.log = [*made.log, traceback.format_exc()]  # type: ignore[attr-defined]
        return f"{type(error).__name__}: {str(error)[:200]} ({where})"
    finally:
        if counts is not None:
            counts += made.counts
    return None


def shrunk(
    seed: int, todo: list[Operation], seconds: float = 60, kind: Kind = ALONE
) -> list[Operation]:
    """A shorter list of operations that still fails: leave runs of them out, then single ones."""
    end, size = time.monotonic() + seconds, max(1, len(todo) // 2)
    while size and time.monotonic() < end:
        at = 0
        while at < len(todo) and time.monotonic() < end:
            fewer = todo[:at] + todo[at + size :]
            if fewer and failure(seed, fewer, None, kind):
                todo = fewer
            else:
                at += size
        size //= 2
    return todo


def report(seed: int, todo: list[Operation], kind: Kind = ALONE) -> str:
    """The words of a failure, shrunk."""
    todo = shrunk(seed, todo, kind=kind)
    found = failure(seed, todo, None, kind) or "did not fail again: it depends on what ran before"
    lines = [f"seed {seed}: {found}", *getattr(failure, "log", [])]
    flag = " --batch" if kind is BATCH else ""
    lines.append(f"python -m tests.programs.attack{flag} --seed {seed} --sequences 1")
    return "\n  ".join(lines)


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.programs.attack",
        epilog=batch.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--batch", action="store_true", help="sessions of a batch, see below")
    parser.add_argument("--seed", type=int, default=1, help="of the first sequence")
    parser.add_argument("--sequences", type=int, help="how many")
    parser.add_argument("--minutes", type=float, help="how long")
    parser.add_argument("--every", type=float, default=60, help="seconds between lines of counts")
    parser.add_argument("--keep-going", action="store_true", help="after a failure too")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="go on after the last seed that FILE holds, where it is there, and keep it up to date",
    )
    return parser.parse_args(arguments)


class Progress:
    """How far a run is. failed: seeds. seconds: spent in runs before this one."""

    def __init__(self, chosen: argparse.Namespace, kind: Kind) -> None:
        self.file, self.began = chosen.resume, time.monotonic()
        self.first = self.seed = chosen.seed
        self.counts, self.failed, self.seconds = kind.counts(), [], 0.0
        if self.file is not None and self.file.exists():
            held = json.loads(self.file.read_text(encoding="utf-8"))
            self.first, self.seed, self.failed = held["first"], held["seed"], held["failed"]
            self.counts, self.seconds = kind.counts(**held["counts"]), held["seconds"]

    @property
    def spent(self) -> float:
        """Seconds, those of earlier runs included."""
        return self.seconds + time.monotonic() - self.began

    def keep(self) -> None:
        """Write the file anew, whole at any moment."""
        if self.file is None:
            return
        held = {
            "first": self.first,
            "seed": self.seed,
            "failed": self.failed,
            "seconds": round(self.spent),
            "counts": asdict(self.counts),
        }
        beside = self.file.with_name(self.file.name + ".new")
        beside.write_text(json.dumps(held, indent=1), encoding="utf-8")
        beside.replace(self.file)

    def __str__(self) -> str:
        return f"{self.counts}, {len(self.failed)} failures in {self.spent:.0f} s"


def main(arguments: list[str] | None = None) -> int:
    """Print every failure and the counts; 1 where there was a failure."""
    chosen = parsed(arguments)
    kind = BATCH if chosen.batch else ALONE
    done = Progress(chosen, kind)
    said = began = time.monotonic()
    end = None if chosen.minutes is None else began + 60 * chosen.minutes
    most = chosen.sequences if chosen.sequences or end else 40
    while most is None or done.counts.sequences < most:
        todo = kind.operations(done.seed)
        found = failure(done.seed, todo, done.counts, kind)
        if found:
            done.failed.append(done.seed)
            print(report(done.seed, todo, kind), flush=True)
        done.seed += 1
        if found and not chosen.keep_going:
            break
        if end is not None and time.monotonic() > end:
            break
        if time.monotonic() - said > chosen.every:
            said = time.monotonic()
            done.keep()
            print(f"seed {done.seed - 1}: {done}", flush=True)
    done.keep()
    print(f"seeds {done.first} to {done.seed - 1}: {done}")
    for name, count in sorted(getattr(done.counts, "by", {}).items()):
        print(f"  {count:6} {name}")
    return 1 if done.failed else 0


if __name__ == "__main__":
    sys.exit(main())
