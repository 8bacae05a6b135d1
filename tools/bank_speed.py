"""`python -m tools.bank_speed`: decode steps over a bank in fewer bits beside one of floats, in
turns.

Random weights of a shape and random rows at every depth (tools/synthetic_bank.py), one thread.
Steps over the two banks take turns, under full attention and under OmniKV, and the table has their
median seconds of thread CPU time, which other programs on the machine disturb less than the clock.
Bytes are those that the banks hold.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine import LLM, Full, OmniKV
from engine.errors import UsageError
from engine.session import Session
from kernels.isa import isa
from kernels.rows import DTYPES
from tools.bench.shapes import SHAPES, parse_size, shape_config, shape_filters
from tools.bench.suite import sharp_stream
from tools.program import guarded, progress, replace_json, require_writable, say
from tools.synthetic_bank import synthesize

ROOM = 256  # tokens of a session beyond its depth


def steps(sessions: Sequence[Session], count: int) -> list[float]:
    """Median seconds of a step of each session, `count` steps in turns after a first one."""
    seconds: list[list[float]] = [[] for _ in sessions]
    for number in range(count + 1):
        for mine, session in zip(seconds, sessions):
            began = time.thread_time()
            session.decode(number)
            if number:
                mine.append(time.thread_time() - began)
    return [statistics.median(mine) for mine in seconds]


def measure(
    shape: str, bank: str, dtype: str, contexts: Sequence[int], count: int
) -> list[dict[str, Any]]:
    """One row per depth and method. Raises EngineError where a bank does not fit."""
    plain = LLM.from_stream(
        shape_config(shape),
        sharp_stream,
        name=shape,
        device="cpu",
        dtype=dtype,
        method=Full(),
        max_context=max(contexts) + ROOM,
    )
    packed = LLM.sharing(plain, bank=bank)
    sparse = OmniKV(filter_layers=shape_filters(shape), dense_below=0)
    rows = []
    for context in contexts:
        for method in (Full(), sparse):
            progress(f"{shape} {dtype}, {context} tokens, {method.name}")
            sessions = [llm.session(method, context + ROOM) for llm in (plain, packed)]
            for session in sessions:
                synthesize(session, context)
            took = steps(sessions, count)
            rows.append(
                {
                    "shape": shape,
                    "dtype": dtype,
                    "instructions": isa(),
                    "tokens": context,
                    "method": method.name,
                    "bank": bank,
                    "seconds": dict(zip(("model", bank), took)),
                    "bytes": {name: s.bank.nbytes for name, s in zip(("model", bank), sessions)},
                }
            )
            for session in sessions:
                session.close()
    say("")
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the rows."""
    lines = [
        f"| tokens | method | step, floats | step, {rows[0]['bank']} | speed | bytes |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        (plain, packed), held = row["seconds"].values(), list(row["bytes"].values())
        lines.append(
            f"| {row['tokens']} | {row['method']} | {plain * 1e3:.1f} ms | {packed * 1e3:.1f} ms | "
            f"{plain / packed:.2f} | {held[1] / held[0]:.3f} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (a bank does not fit) or 2 (usage)."""
    parser = argparse.ArgumentParser(prog="python -m tools.bank_speed", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="160m")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--bank", choices=tuple(DTYPES), default="int8")
    parser.add_argument("--contexts", default="8K,32K", metavar="N,N")
    parser.add_argument("--steps", type=int, default=9, metavar="N", help="timed, per bank")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)

    def work() -> None:
        if args.json:
            require_writable("--json", args.json)
        try:
            contexts = [parse_size(text) for text in args.contexts.split(",")]
        except ValueError as error:
            raise UsageError(f"--contexts: {error}") from error
        if args.steps < 1 or min(contexts) < 1:
            raise UsageError("--steps, --contexts: expected at least 1")
        torch.set_num_threads(1)
        rows = measure(args.shape, args.bank, args.dtype, contexts, min(args.steps, ROOM - 1))
        print(f"{args.shape}, {args.dtype}, one thread, {isa()}, thread CPU time\n")
        print(table(rows))
        if args.json:
            replace_json(args.json, rows)

    return guarded(work)


if __name__ == "__main__":
    sys.exit(main())
