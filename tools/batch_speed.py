"""`python -m tools.batch_speed`: several sequences in one decode step, beside the same ones one
after the other.

Random weights of a shape and random rows at every depth (tools/synthetic_bank.py). The two ways
take turns over the same sessions, and the table has the median seconds for one token of every
sequence: of thread CPU time with one thread, which other programs on the machine disturb less than
the clock, and of the clock with several.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from engine import LLM, Full, OmniKV
from engine.batch import MOST_SLOTS, Batch
from engine.errors import UsageError
from engine.session import Session
from kernels.isa import isa
from tools.bench.header import commit, hardware
from tools.bench.shapes import SHAPES, parse_size, shape_config, shape_filters
from tools.bench.suite import sharp_stream
from tools.program import guarded, progress, replace_json, require_writable, say
from tools.synthetic_bank import synthesize

ROOM = 256  # tokens of a session beyond its depth


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


def seconds(
    batch: Batch, sessions: Sequence[Session], turns: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """(one after the other, together): median seconds of `turns` turns of each after a first."""
    found: tuple[list[float], list[float]] = [], []
    for turn in range(turns + 1):
        for mine, work in zip(
            found,
            (lambda t: alone(sessions, t), lambda t: together(batch, sessions, t)),
        ):
            began = clock()
            work(turn)
            if turn:
                mine.append(clock() - began)
    one, other = map(statistics.median, found)
    return one, other


def measure(llm: LLM, context: int, slots: Sequence[int], turns: int) -> list[dict[str, Any]]:
    """One row per method and number of sequences, all of `context` tokens."""
    rows, threads = [], torch.get_num_threads()
    clock = time.thread_time if threads == 1 else time.perf_counter
    sparse = OmniKV(filter_layers=shape_filters(llm.name), dense_below=0)
    for method in (Full(), sparse):
        with llm.batch(max(slots)) as batch:
            sessions = [batch.session(method, context + ROOM) for _ in range(max(slots))]
            for seed, session in enumerate(sessions):
                progress(f"{llm.name}, {method.name}, filling {seed + 1} of {len(sessions)}")
                synthesize(session, context, seed)
            for count in slots:
                one, other = seconds(batch, sessions[:count], turns, clock)
                rows.append(
                    {
                        "shape": llm.name,
                        "dtype": str(llm.dtype).removeprefix("torch."),
                        "weights": llm.options.weights,
                        "instructions": isa(),
                        "threads": threads,
                        "tokens": context,
                        "method": method.name,
                        "sequences": count,
                        "alone_seconds": one,
                        "together_seconds": other,
                        "ratio": one / other,
                    }
                )
    say("")
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the rows."""
    lines = [
        "| tokens | method | sequences | one after the other | together | tokens/s | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        one, other, count = row["alone_seconds"], row["together_seconds"], row["sequences"]
        lines.append(
            f"| {row['tokens']} | {row['method']} | {count} | {one * 1e3:.1f} ms | "
            f"{other * 1e3:.1f} ms | {count / other:.1f} | {row['ratio']:.2f} |"
        )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> None:
    """Measure and print one table."""
    if args.json:
        require_writable("--json", args.json)
    try:
        context = parse_size(args.context)
        slots = [int(text) for text in args.slots.split(",")]
    except ValueError as error:
        raise UsageError(f"--context, --slots: {error}") from error
    if not all(1 <= count <= MOST_SLOTS for count in slots):
        raise UsageError(f"--slots: found {args.slots}, expected 1 to {MOST_SLOTS}")
    if not 1 <= args.turns or (args.turns + 1) * 2 * len(slots) > ROOM:
        raise UsageError(f"--turns: found {args.turns}, expected 1 to {ROOM // 2 // len(slots)}")
    if not 1 <= args.threads <= (os.cpu_count() or 1):
        raise UsageError(f"--threads: found {args.threads}, expected 1 to {os.cpu_count()}")
    torch.set_num_threads(args.threads)
    llm = LLM.from_stream(
        shape_config(args.shape),
        sharp_stream,
        name=args.shape,
        device="cpu",
        dtype=args.dtype,
        weights=args.weights,
        max_context=context + ROOM,
    )
    rows = measure(llm, context, slots, args.turns)
    measured = "thread CPU time" if args.threads == 1 else "clock"
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    print(
        f"{args.shape}, {args.dtype}, {args.threads} thread(s), {isa()}, {measured}, "
        f"{args.turns} turns, load {load:.1f}\n"
    )
    print(table(rows))
    if args.json:
        replace_json(args.json, {"commit": commit(), "hardware": hardware("cpu"), "rows": rows})


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (a bank does not fit) or 2 (usage)."""
    parser = argparse.ArgumentParser(prog="python -m tools.batch_speed", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="160m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--weights", choices=("auto", "int8", "int4"), default="auto")
    parser.add_argument("--context", default="2K", metavar="N", help="tokens of every sequence")
    parser.add_argument("--slots", default="2,4,8", metavar="N,N", help="sequences in one step")
    parser.add_argument("--turns", type=int, default=15, metavar="N", help="timed, of each way")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
