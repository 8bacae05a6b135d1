"""Several sequences in one decode step, beside the same ones one
after the other.

Random weights of a shape and random rows at every depth (tools/common/synthetic_bank.py). The two
ways take turns over the same sessions, and the table has the median seconds for one token of every
sequence: of thread CPU time with one thread, which other programs on the machine disturb less than
the clock, and of the clock with several.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from engine import Full, OmniKV
from engine.base.errors import UsageError
from engine.batch.batch import MOST_SLOTS, Batch
from engine.session.session import Session
from tools.bench.shapes import shape_filters
from tools.common.program import progress, say
from tools.common.synthetic_bank import synthesize
from tools.speed import harness
from tools.speed.harness import ROOM, SHAPED, Report, flag


def alone(sessions: Sequence[Session], token: int) -> None:
    """One token of each, one after the other."""
    for session in sessions:
        session.decode(token)


def together(batch: Batch, sessions: Sequence[Session], token: int) -> None:
    """One token of each, in one step. Raises what a session raised."""
    for session in sessions:
        batch.feed(session, token)
    for found in batch.step().values():
        if isinstance(found, Exception):
            raise found


def measure(args: argparse.Namespace, context: int, slots: Sequence[int]) -> list[dict[str, Any]]:
    """One row per method and number of sequences, all of `context` tokens."""
    llm = harness.shape_llm(args, context + ROOM, weights=args.weights)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    facts = harness.shape_facts(args) | dict(weights=args.weights, threads=args.threads)
    rows, took = [], partial(harness.seconds, clock=clock)
    sparse = OmniKV(filter_layers=shape_filters(llm.name), dense_below=0)
    for method in (Full(), sparse):
        with llm.batch(max(slots)) as batch:
            sessions = [batch.session(method, context + ROOM) for _ in range(max(slots))]
            for seed, session in enumerate(sessions):
                progress(f"{llm.name}, {method.name}, filling {seed + 1} of {len(sessions)}")
                synthesize(session, context, seed)
            for count in slots:
                some = sessions[:count]
                ways = {
                    "one": partial(took, alone, some),
                    "all": partial(took, together, batch, some),
                }
                one, other = map(statistics.median, harness.in_turns(ways, args.turns).values())
                row = dict(tokens=context, method=method.name, sequences=count)
                row |= dict(alone_seconds=one, together_seconds=other, ratio=one / other)
                rows.append(facts | row)
    say("")
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the rows."""
    cells = []
    for row in rows:
        one, other, count = row["alone_seconds"], row["together_seconds"], row["sequences"]
        took = f"{one * 1e3:.1f} ms", f"{other * 1e3:.1f} ms", f"{count / other:.1f}"
        cells.append((row["tokens"], row["method"], count, *took, f"{row['ratio']:.2f}"))
    names = "tokens | method | sequences | one after the other | together | tokens/s | ratio"
    return harness.markdown(names, cells)


def work(args: argparse.Namespace) -> Report:
    """Measure one table."""
    context, slots = harness.size(args, "context"), harness.sizes(args, "slots")
    if max(slots) > MOST_SLOTS:
        raise UsageError(f"--slots: found {args.slots}, expected 1 to {MOST_SLOTS}")
    harness.require(args, 1, "turns", most=ROOM // 2 // len(slots) - 1)
    harness.require(args, 1, "threads", most=os.cpu_count() or 1)
    torch.set_num_threads(args.threads)
    rows = measure(args, context, slots)
    measured = "thread CPU time" if args.threads == 1 else "clock"
    facts = f"{args.shape}, {args.dtype}, {args.threads} thread(s), {measured}, {args.turns} turns"
    return Report(f"{facts}, {harness.machine()}", table(rows), {**harness.origin(), "rows": rows})


FLAGS = SHAPED | {
    "--weights": dict(choices=("auto", "int8", "int4"), default="auto"),
    "--context": flag("2K", "tokens of every sequence"),
    "--slots": flag("2,4,8", "sequences in one step"),
    "--turns": flag(15, "timed, of each way"),
    "--threads": flag(1, "of torch"),
}
main = harness.program("batch", __doc__, FLAGS, work)

if __name__ == "__main__":
    sys.exit(main())
