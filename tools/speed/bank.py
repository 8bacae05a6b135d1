"""Decode steps over a bank in fewer bits beside one of floats, in turns.

Random weights of a shape and random rows at every depth (tools/common/synthetic_bank.py), one
thread. Steps over the two banks take turns, under full attention and under OmniKV, and the table
has their median seconds of thread CPU time, which other programs on the machine disturb less than
the clock. Bytes are those that the banks hold.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch

from engine import LLM, Full, OmniKV
from kernels.rows.forms import DTYPES
from tools.bench.shapes import shape_filters
from tools.common.program import progress, say
from tools.common.synthetic_bank import synthesize
from tools.speed import harness
from tools.speed.harness import ROOM, SHAPED, Report, flag


def measure(args: argparse.Namespace, contexts: Sequence[int]) -> list[dict[str, Any]]:
    """One row per depth and method. Raises EngineError where a bank does not fit."""
    plain = harness.shape_llm(args, max(contexts) + ROOM, method=Full())
    packed = LLM.sharing(plain, bank=args.bank)
    sparse = OmniKV(filter_layers=shape_filters(args.shape), dense_below=0)
    names, rows = ("model", args.bank), []
    for context in contexts:
        for method in (Full(), sparse):
            progress(f"{args.shape} {args.dtype}, {context} tokens, {method.name}")
            sessions = [llm.session(method, context + ROOM) for llm in (plain, packed)]
            for session in sessions:
                synthesize(session, context)
            took = dict(zip(names, harness.steps(sessions, args.steps)))
            held = {name: session.bank.nbytes for name, session in zip(names, sessions)}
            row = dict(tokens=context, method=method.name, bank=args.bank, seconds=took, bytes=held)
            rows.append(harness.shape_facts(args) | row)
            for session in sessions:
                session.close()
    say("")
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table of the rows."""
    cells = []
    for row in rows:
        (plain, packed), held = row["seconds"].values(), list(row["bytes"].values())
        took = f"{plain * 1e3:.1f} ms", f"{packed * 1e3:.1f} ms", f"{plain / packed:.2f}"
        cells.append((row["tokens"], row["method"], *took, f"{held[1] / held[0]:.3f}"))
    names = f"tokens | method | step, floats | step, {rows[0]['bank']} | speed | bytes"
    return harness.markdown(names, cells)


def work(args: argparse.Namespace) -> Report:
    """Measure one table."""
    harness.require(args, 1, "steps", most=ROOM - 1)
    contexts = harness.sizes(args, "contexts")
    torch.set_num_threads(1)
    rows = measure(args, contexts)
    return Report(harness.one_thread(args), table(rows), rows)


FLAGS = SHAPED | {
    "--bank": dict(choices=tuple(DTYPES), default="int8"),
    "--contexts": flag("8K,32K", "depths of both banks"),
    "--steps": flag(9, "timed, per bank"),
}
main = harness.program("bank", __doc__, FLAGS, work)

if __name__ == "__main__":
    sys.exit(main())
