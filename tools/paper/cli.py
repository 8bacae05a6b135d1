"""Run tables and figures of papers by name: ours beside the paper's, with the difference, and one
line where that cannot be.

What is measured goes to a folder of the table and the model, answer by answer, so the same command
goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import difflib
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from engine.base.errors import EngineError, UsageError
from engine.text.boundary import one_line
from tools.common.arguments import JUDGED, add_flags, command, require_least, require_minutes
from tools.common.program import guarded, one_at_a_time, say
from tools.paper.papers import TABLES
from tools.paper.run import measured
from tools.paper.table import Table

EPILOG = """examples:
  python -m tools.paper --list
  python -m tools.paper table2 --limit 4                       the shipped judge, a few answers
  python -m tools.paper table2 --model llama-3-8b-262k         as published, on a card
  python -m tools.paper table6 fig1c --model ../smollm2 --estimate
  python -m tools.paper table1 --model yi-9b-200k --data LongBench/data

Lengths are the paper's on a card, else short ones; --length says others."""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command(
        "python -m tools.paper",
        "Run tables and figures of papers by name, the paper's figures beside ours.",
        EPILOG,
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="of --list")
    add(
        "--list", action="store_true", help="every name, what it shows, and why where it cannot run"
    )
    add_flags(
        parser,
        "model filters estimate minutes device dtype threads out fresh",
        model=JUDGED,
        out=Path("paper-out"),
    )
    add("--limit", type=int, metavar="N", help="answers, texts or timed steps of every cell")
    add("--length", type=int, nargs="+", metavar="TOKENS", help="instead of the table's")
    add("--data", type=Path, metavar="DIR", help="LongBench's, InfiniteBench's or L-Eval's files")
    return parser.parse_args(argv)


def listed(tables: Mapping[str, Table]) -> str:
    """A line for every table, by paper."""
    lines = []
    for paper in dict.fromkeys(table.paper for table in tables.values()):
        own = [table for table in tables.values() if table.paper == paper]
        lines += ["", paper]
        lines += [f"  {t.name:<20} {t.place}: {t.about}{_needs(t)}" for t in own]
    return "\n".join(lines[1:])


def _needs(table: Table) -> str:
    if table.why:
        return f" [not here: {table.why}]"
    if table.suite:
        return " [needs --data DIR]"
    return " [needs a card, or --device cpu]" if table.card else ""


def chosen(names: Sequence[str], tables: Mapping[str, Table]) -> list[Table]:
    """The tables of some names. Raises UsageError for one that is none, with the nearest."""
    if not names:
        raise UsageError("name a table or figure, such as table2; --list has them all")
    for name in names:
        if name not in tables:
            plain = re.sub(r"\W", "", name.lower()).replace("figure", "fig")
            near = difflib.get_close_matches(plain, tables, 1, 0.0)
            raise UsageError(f"{name}: no such table, expected one of --list; nearest: {near[0]}")
    return [tables[name] for name in dict.fromkeys(names)]


def check(args: argparse.Namespace) -> None:
    """Raise UsageError where a number cannot be meant, or a folder is none."""
    require_least(args, limit=1, length=1)
    require_minutes(args)
    if args.data is not None and not args.data.is_dir():
        raise UsageError(f"--data: found no folder {args.data}")


def run(args: argparse.Namespace) -> int:
    """Every table that is asked for; 1 where none of them could be measured."""
    if args.list:
        print(listed(TABLES))
        return 0
    tables = chosen(args.names, TABLES)
    check(args)
    args.card = args.device != "cpu" and torch.cuda.is_available()
    done = 0
    for table in tables:
        try:
            page = measured(args, table)
        except EngineError as error:
            if len(tables) == 1:
                raise
            page = None
            say(f"error: {table.name}: {one_line(str(error))}")
        done += page is not None
        if page:
            print(page)
    return 0 if done else 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print. Exit code 0, 1 (nothing was measured, or a run failed), 2 (usage) or 130."""
    args = arguments(argv)
    warnings.simplefilter("ignore", UserWarning)

    def work() -> int:
        if args.list:
            return run(args)
        with one_at_a_time(args.out):
            return run(args)

    return guarded(work, f"stopped; the same command goes on from {args.out}")
