"""One table: its commands or its line, its page and its JSON, or the line that says why not."""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict
from pathlib import Path

import torch

from engine import LLM
from tools.bench import header
from tools.common.program import model_label, replace_json, replace_text
from tools.paper.lines import needles
from tools.paper.lines.run import LINES, run_line
from tools.paper.programs import at_depth, lengths_of, limit_of, run_command
from tools.paper.report import markdown
from tools.paper.suites import missing
from tools.paper.table import Command, Rows, Table
from tools.paper.values import Value, means, values_of

SPLIT = "this engine has not run a split over cards yet"


def reason(args: argparse.Namespace, table: Table) -> str:
    """Why a table cannot be measured here, in a line; empty where it can."""
    if table.why:
        return table.why
    if table.card and args.device != "cpu":
        here = torch.cuda.device_count() if args.card else 0
        if here < table.cards:
            needs = "no card here"
            if table.cards > 1:
                needs = f"needs {table.cards} cards, found {here} here"
            return f"not measured: {needs}; --device cpu times this machine instead"
        if table.cards > 1:
            return f"not measured: {SPLIT}; --device cpu times this machine instead"
    return missing(table.suite, args.data) if table.suite else ""


def measured(args: argparse.Namespace, table: Table) -> str | None:
    """The page of a table ("" after an estimate); None where it cannot be measured, which a line
    on stdout then says.
    """
    if why := reason(args, table):
        print(f"{table.name} ({table.paper}, {table.place}): {why}")
        return None
    name = re.sub(r"[^\w.-]+", "-", Path(args.model).name)
    folder = args.out / table.name / name
    values = _of_line(args, table, folder) if table.line else _of_commands(args, table, folder)
    if args.estimate:
        return ""
    figures, whose = figures_of(table, args.model)
    about = {
        "same model": whose == args.model,
        "paper model": whose,
        "settings": settings(args, table),
        "hardware": hardware(args),
        "command": f"python -m tools.paper {' '.join(header.flags_given())}",
    }
    model = model_label(args.model)
    model = Path(model).name if Path(model).is_absolute() else model
    page = markdown(table, model, figures, values, about)
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "report.md", page)
    replace_json(
        folder / "report.json",
        {
            "table": table.name,
            "model": model,
            **about,
            "paper": figures,
            "ours": [asdict(value) for value in values],
        },
    )
    return page


def figures_of(table: Table, model: str) -> tuple[Rows, str]:
    """(the paper's rows, alias of their model): the model's own, else of the table's first."""
    whose = model if model in table.figures else next(iter(table.figures), "")
    return table.figures.get(whose, {}), whose


def settings(args: argparse.Namespace, table: Table) -> str:
    """What a run had, in words."""
    tokens = ", ".join(f"{n:,}" for n in lengths_of(args, table))
    filters = f", filter layers {{{', '.join(map(str, args.filters))}}}" if args.filters else ""
    return f"{tokens} tokens, {limit_of(args, table)} of each{filters}, {args.dtype} dtype"


def hardware(args: argparse.Namespace) -> str:
    """The machine, its load and the code."""
    load = ", ".join(map(str, header.load() or ["unknown"]))
    device = torch.device("cuda" if args.card else "cpu")
    return f"{header.hardware(device)}; load {load}; commit {header.commit()}"


def _of_commands(args: argparse.Namespace, table: Table, folder: Path) -> list[Value]:
    values: list[Value] = []
    commands = table.commands
    if any(re.search(r"\bL\d", command.flags) for command in commands):
        layers = LLM(args.model, load=False).config.num_layers
        scaled = {(found := at_depth(command, layers)).flags: found for command in commands[::-1]}
        commands = tuple(scaled.values())[::-1]
    for number, command in enumerate(commands):
        place = folder / f"{number}" if len(commands) > 1 else folder / "run"
        run_command(args, table, with_data(args, table, command), place)
        values += [] if args.estimate else values_of(table, command, place)
    return values


def with_data(args: argparse.Namespace, table: Table, command: Command) -> Command:
    """A command of a suite with its name and its files."""
    if not table.suite:
        return command
    flags = f"--tasks {table.suite} --data {args.data} {command.flags}"
    return Command(command.program, flags, command.label)


def _of_line(args: argparse.Namespace, table: Table, folder: Path) -> list[Value]:
    records = run_line(args, table, LINES[table.line], folder)
    if table.line == "needles" and not args.estimate:
        needles.picture(records, folder / "depth.png")
    return [] if args.estimate else means(records, table.unit == "per cent")
