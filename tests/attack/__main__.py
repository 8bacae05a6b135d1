"""python -m tests.attack: run sequences until the time is over; shrink what fails."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback

from tests.attack.sequence import LLMS, Counts, Operation, Sequence, operations


def failure(seed: int, todo: list[Operation], counts: Counts | None = None) -> str | None:
    """What goes wrong in a sequence: one line; None where nothing does."""
    sequence = Sequence(seed)
    try:
        sequence.run(todo)
    except Exception as error:
        LLMS.clear()  # an LLM that was left busy would spoil what follows
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{os.path.basename(place.filename)}:{place.lineno}"
        failure.log = [*sequence.log, traceback.format_exc()]  # type: ignore[attr-defined]
        return f"{type(error).__name__}: {str(error)[:200]} ({where})"
    finally:
        if counts is not None:
            counts += sequence.counts
    return None


def shrunk(seed: int, todo: list[Operation], seconds: float = 60) -> list[Operation]:
    """A shorter list of operations that still fails: leave runs of them out, then single ones."""
    end, size = time.monotonic() + seconds, max(1, len(todo) // 2)
    while size and time.monotonic() < end:
        at = 0
        while at < len(todo) and time.monotonic() < end:
            fewer = todo[:at] + todo[at + size :]
            if fewer and failure(seed, fewer):
                todo = fewer
            else:
                at += size
        size //= 2
    return todo


def report(seed: int, todo: list[Operation]) -> str:
    """The words of a failure, shrunk."""
    todo = shrunk(seed, todo)
    found = failure(seed, todo) or "did not fail again: it depends on what ran before"
    lines = [f"seed {seed}: {found}", *getattr(failure, "log", [])]
    lines.append(f"python -m tests.attack --seed {seed} --sequences 1")
    return "\n  ".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Print every failure and the counts; 1 where there was a failure."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack")
    parser.add_argument("--seed", type=int, default=1, help="of the first sequence")
    parser.add_argument("--sequences", type=int, help="how many")
    parser.add_argument("--minutes", type=float, help="how long")
    parser.add_argument("--every", type=float, default=60, help="seconds between lines of counts")
    parser.add_argument("--keep-going", action="store_true", help="after a failure too")
    chosen = parser.parse_args(arguments)
    counts, failures, seed, began = Counts(), 0, chosen.seed, time.monotonic()
    said = began
    end = None if chosen.minutes is None else began + 60 * chosen.minutes
    most = chosen.sequences if chosen.sequences or end else 40
    while (most is None or counts.sequences < most) and (end is None or time.monotonic() < end):
        todo = operations(seed)
        if failure(seed, todo, counts):
            failures += 1
            print(report(seed, todo), flush=True)
            if not chosen.keep_going:
                break
        seed += 1
        if time.monotonic() - said > chosen.every:
            said = time.monotonic()
            print(f"{said - began:.0f} s: {counts}, {failures} failures", flush=True)
    spent = time.monotonic() - began
    print(f"seeds {chosen.seed} to {seed - 1}: {counts}, {failures} failures in {spent:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
