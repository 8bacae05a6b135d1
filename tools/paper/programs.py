"""Run the programs of tools that a table is made of, as a user would, in this process: model,
lengths, limit and folder as each of them takes them.

Each keeps its own answers and goes on where it was stopped; what is timed in one go is kept whole,
and is not timed again under the same command.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from engine.base.errors import EngineError, UsageError
from engine.ranks.place import allowed_cores
from tools.common.program import POCKET, replace_json, say
from tools.paper.table import Command, Table

HOME = __package__.rpartition(".")[0]  # engine.tools where the engine is installed
# what a run of seconds leaves
TIMED = {"bench": "bench.json", "prefill": "report.json", "ranks": "ranks.json"}
KEPT = "command.json"
CHUNK = 256  # tokens of a prompt's chunk without a card
DEPTH = 32  # layers of Llama-3-8B, whose numbers the papers give


@dataclass(frozen=True)
class Program:
    """A program of tools. module: below tools. flags(args, table, folder): what every command of it
    is given. goes_on: whether it keeps answers one by one, and takes --estimate and --fresh.
    """

    module: str
    flags: Callable[[argparse.Namespace, Table, Path], list[str]]
    goes_on: bool = True


def lengths_of(args: argparse.Namespace, table: Table) -> tuple[int, ...]:
    """Tokens that a table is run at: those asked for, the paper's on a card, else few."""
    if args.length:
        return tuple(args.length)
    return table.lengths if args.card else table.small


def limit_of(args: argparse.Namespace, table: Table) -> int:
    """How many answers, texts or steps."""
    return table.limit if args.limit is None else int(args.limit)


def _common(args: argparse.Namespace) -> list[str]:
    found = ["--model", args.model, "--device", args.device, "--dtype", args.dtype]
    return found + (["--threads", str(args.threads)] if args.threads else [])


def _suites(args: argparse.Namespace, table: Table, folder: Path) -> list[str]:
    """Local files have their own lengths: --length cuts their prompts. Prompts that are made beside
    them have it too.
    """
    found = [*_common(args), "--out", str(folder), "--samples", str(limit_of(args, table))]
    found += ["--lengths", str(max(lengths_of(args, table)))]
    found += ["--max-length", str(max(args.length))] if args.length else []
    return found + (["--filters", *map(str, args.filters)] if args.filters else [])


def _asks(args: argparse.Namespace, table: Table, folder: Path) -> list[str]:
    numbers = [str(n) for n in lengths_of(args, table)]
    found = [*_common(args), "--out", str(folder), "--answers", str(limit_of(args, table))]
    filters = ["--filters", *map(str, args.filters)] if args.filters else []
    return [*found, "--lengths", *numbers, *filters]


def _bench(args: argparse.Namespace, table: Table, folder: Path) -> list[str]:
    shape = next((name for name in SHAPES if args.model.startswith(name)), None)
    what = ["--model", args.model] if shape is None else ["--shape", shape]
    if args.model == str(POCKET):
        what = ["--shape", "pocket"]
    numbers = ",".join(str(n) for n in lengths_of(args, table))
    layers = ["--filter-layers", ",".join(map(str, args.filters))] if args.filters else []
    own = ["--device", args.device, "--dtype", args.dtype, "-d", numbers, *layers]
    own += ["-t", str(args.threads)] if args.threads else []
    return [*what, *own, "-n", str(limit_of(args, table)), "--save", str(folder / TIMED["bench"])]


def _prefill(args: argparse.Namespace, table: Table, folder: Path) -> list[str]:
    shape = next((name for name in SHAPES if args.model.startswith(name)), "pocket")
    own = ["--shape", shape, "--device", args.device, "--out", str(folder)]
    own += ["--threads", str(args.threads)] if args.threads else []
    lengths = lengths_of(args, table)
    if not args.card:  # a first and a last chunk are timed, which short prompts have of short ones
        if min(lengths) < 2 * CHUNK:
            raise UsageError(
                f"--length: found {min(lengths)}, expected at least {2 * CHUNK} tokens, two chunks"
            )
        own += ["--chunk", str(CHUNK)]
    return [*own, "--repeats", str(limit_of(args, table)), "--lengths", *map(str, lengths)]


def _ranks(args: argparse.Namespace, table: Table, folder: Path) -> list[str]:
    """As many ranks as the paper has cards, or as this process has cores."""
    shape = next((name for name in SHAPES if args.model.startswith(name)), "pocket")
    count = max(2, min(table.cards, len(allowed_cores())))
    numbers = ",".join(str(n) for n in lengths_of(args, table))
    own = ["--shape", shape, "--ways", "ranks", "--ranks", str(count), "--context", numbers]
    own += [] if args.dtype == "auto" else ["--dtype", args.dtype]
    return [*own, "--steps", str(limit_of(args, table)), "--json", str(folder / TIMED["ranks"])]


SHAPES = ("llama-3-8b", "llama-3.2-1b", "pocket", "160m")  # whose time random weights take too
PROGRAMS = {
    "compare": Program("compare", _asks),
    "suites": Program("suites", _suites),
    "bench": Program("bench", _bench, goes_on=False),
    "prefill": Program("studies.prefill.table", _prefill, goes_on=False),
    "ranks": Program("speed.ranks", _ranks, goes_on=False),
}


def argv_of(
    args: argparse.Namespace, table: Table, command: Command, folder: Path
) -> tuple[str, list[str]]:
    """(module, flags) of a command. Its own flags come last, so that they win."""
    program = PROGRAMS[command.program]
    flags = program.flags(args, table, folder) + command.flags.split()
    if program.goes_on:
        flags += [f"--{name}" for name in ("estimate", "fresh") if getattr(args, name)]
        flags += [] if args.minutes is None else ["--minutes", f"{args.minutes:g}"]
    return f"{HOME}.{program.module}", flags


def at_depth(command: Command, layers: int) -> Command:
    """A command whose layers of 32, L2 or L18, stand at the same depths of a model of `layers`."""

    def scaled(found: re.Match[str]) -> str:
        return str(int(found[1]) * layers // DEPTH)

    return replace(command, flags=re.sub(r"\bL(\d+)\b", scaled, command.flags))


def run_command(args: argparse.Namespace, table: Table, command: Command, folder: Path) -> None:
    """Run a command, or leave it where it has been timed. Raises EngineError where it fails."""
    program = PROGRAMS[command.program]
    module, flags = argv_of(args, table, command, folder)
    kept = folder / KEPT
    if not program.goes_on:
        if args.estimate:
            say(f"{table.name}: {program.module} times {limit_of(args, table)} steps or turns each")
            return
        if not args.fresh and _same(kept, flags):
            return
    folder.mkdir(parents=True, exist_ok=True)
    say(f"{table.name}: python -m {module} {' '.join(flags)}")
    code, page = called(module, flags)
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise EngineError(f"python -m {module} ended with exit code {code}: see above")
    if page.strip():
        (folder / "page.md").write_text(page, encoding="utf-8")
    if not program.goes_on:
        replace_json(kept, flags)


def _same(kept: Path, flags: Sequence[str]) -> bool:
    try:
        return bool(json.loads(kept.read_text(encoding="utf-8")) == list(flags))
    except (OSError, ValueError):
        return False


def called(module: str, flags: Sequence[str]) -> tuple[int, str]:
    """(exit code, what it printed) of `python -m module flags`, in this process."""
    before, printed, code = sys.argv, io.StringIO(), 0
    sys.argv = [module, *flags]
    try:
        with contextlib.redirect_stdout(printed):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
    except ImportError as error:
        raise UsageError(f"{module} is not here ({error}): run it from a clone") from error
    finally:
        sys.argv = before
    return code, printed.getvalue()
