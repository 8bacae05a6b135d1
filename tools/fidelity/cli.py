"""How near every method stays to full attention on real
text, with controls.

Records go to records.jsonl column by column, so the same command goes on where it was stopped;
texts go round kinds and lengths, so a stopped run has figures in every table.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

from engine.base.errors import UsageError
from engine.plan.layers import layer_plan
from tools.bench import header as bench_header
from tools.common.arguments import add_flags, command, loaded, require_least, require_minutes
from tools.common.documents import KINDS, SPLITS
from tools.common.program import guarded, say
from tools.compare.comparison import span
from tools.compare.methods import REGISTRY
from tools.compare.own import load
from tools.fidelity.columns import DEFAULT_METHODS, SETS
from tools.fidelity.needles import PEOPLE
from tools.fidelity.report import write
from tools.fidelity.work import FILE, Rates, Study

EPILOG = """methods: {methods}
or rivals (all but full attention and OmniKV's own), controls (OmniKV with a choice that knows
nothing), t1, others; budgets in per cent of the tokens after an @: omnikv@1,3,6.67 h2o@30, or of
the bytes that a step of full attention reads: omnikv@r30 quest@r20,r30.
OmniKV and its controls run with every filter set and number of wait layers.

examples:
  python -m tools.fidelity --model ../smollm2 --dtype float32 --estimate
  python -m tools.fidelity --model ../smollm2 --methods omnikv@6.67 controls@6.67 --filters even \\
      loss=3,5,8,17,20,23 --waits 0
"""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command(
        "python -m tools.fidelity",
        "Compare methods with full attention, step by step, on real text.",
        EPILOG.format(methods=", ".join(REGISTRY)),
    )
    _what(parser)
    _texts(parser)
    _running(parser)
    return parser.parse_args(argv)


def _what(parser: argparse.ArgumentParser) -> None:
    """The model and the columns."""
    add = parser.add_argument
    about = (
        f"names and groups below (default: {' '.join(DEFAULT_METHODS)}); full attention always runs"
    )
    methods = dict(default=list(DEFAULT_METHODS), help=about)
    model = dict(default=None, help="alias, hub id or folder of a trained model")
    add_flags(parser, "model methods import tail", model=model, methods=methods)
    add(
        "--filters",
        nargs="+",
        default=["published", "even"],
        metavar="SET",
        help=f"{', '.join(SETS)}, layers such as 2,8,17, or NAME=2,8,17 (default: published even)",
    )
    add("--waits", nargs="+", type=int, default=[0, 1], help="numbers of wait layers")


def _texts(parser: argparse.ArgumentParser) -> None:
    """What they are measured on."""
    add = parser.add_argument
    add("--lengths", nargs="+", type=int, default=[1500, 3000, 6000], help="tokens of a text")
    add("--texts", type=int, default=8, help="texts per length (0: none, needles only)")
    add(
        "--kinds",
        nargs="+",
        choices=KINDS,
        default=list(KINDS),
        help="kinds of text, in turn (default: all)",
    )
    add("--split", choices=SPLITS, default="held-out", help="of the documents")
    add("--positions", type=int, default=32, help="last tokens of a text that are decoded")
    add(
        "--answer",
        type=int,
        default=32,
        help="tokens of full attention's own answer after the same head (0: none)",
    )
    add(
        "--question",
        type=int,
        default=0,
        help="tokens before the scored ones that each method's own steps read, in a second pass; "
        "those who ask for needles are read so too (0: no second pass)",
    )
    add("--needles", type=int, default=0, help="texts per length with facts to be asked for")
    add("--questions", type=int, default=3, help="facts per such text")
    add("--mass", action="store_true", help="measure the attention mass kept in every sparse layer")


def _running(parser: argparse.ArgumentParser) -> None:
    """Where and how long it runs."""
    add_flags(parser, "device dtype threads minutes estimate out fresh", out=Path("fidelity-out"))


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments, lengths ascending; UsageError where they cannot be meant."""
    if not args.model:
        raise UsageError(
            "--model: found none, expected a folder of a trained model (the shipped one looks "
            "everything up in one layer: it does not test a selection)"
        )
    require_least(args, texts=0, needles=0, answer=0, positions=1, questions=1, question=0)
    if args.texts + args.needles == 0:
        raise UsageError("--texts: found 0 and no --needles: nothing to measure")
    if args.questions > len(PEOPLE):
        raise UsageError(f"--questions: found {args.questions}, expected at most {len(PEOPLE)}")
    if min(args.lengths) < 1 or min(args.waits) < 0:
        raise UsageError("--lengths, --waits: found a number below its least, 1 and 0")
    require_minutes(args)
    args.lengths = sorted(set(args.lengths))
    args.waits = list(dict.fromkeys(args.waits))
    return args


def run(args: argparse.Namespace) -> None:
    """Everything between the command line and the report."""
    checked(args)
    REGISTRY.update(load(args.imports))
    if args.threads:
        torch.set_num_threads(args.threads)
    llm = loaded(args)
    study = Study(args, llm)
    rates = Rates.measured(llm)
    todo = [(len(found), unit) for unit in study.units if (found := study.todo(unit))]
    say(
        f"{sum(n for n, _ in todo)} columns on {len(todo)} texts to do, estimated "
        f"{span(study.left(rates))}, from a short warm-up"
    )
    for label, why in study.skipped.items():
        say(f"  not: {label}: {why}")
    if args.estimate:
        return
    try:
        study.run(rates, args.minutes)
    finally:
        if study.file.records:
            page = write(study.file.records, about(study), study.skipped, args.out)
    if study.file.records:
        print(page)
        print(f"report, records and plot: {args.out}")


def about(study: Study) -> dict[str, str]:
    """Where it was measured."""
    llm, args = study.llm, study.args
    return {
        "model": f"{study.header['settings']['model']}, {llm.config.num_layers} layers",
        "weights": study.header["settings"]["weights"],
        "dtype": study.header["settings"]["dtype"],
        "machine": f"{bench_header.hardware(llm.device)}, {torch.get_num_threads()} thread(s)",
        "load": ", ".join(f"{value:.1f}" for value in os.getloadavg()),
        "commit": bench_header.commit(),
        "texts": f"{args.split} split; each decodes its last {args.positions} tokens"
        + (f", and {args.answer} of full attention's answer" if args.answer else "")
        + (f"; a question of {args.question} before them" if args.question else ""),
        "filters": _filters(study),
    }


def _filters(study: Study) -> str:
    """The layers of every filter set and number of wait layers that were ever measured here."""
    found, depth = {}, study.llm.config.num_layers
    for key, method in study.header["methods"].items():
        layers = re.search(r"filter_layers=\(([\d, ]+)\)", method)
        wait = re.search(r"wait_layers=(\d+)", method)
        column = re.match(r"omnikv [\d.]+% (.+) @ \d+$", key)
        if layers and wait and column:
            numbers = tuple(int(n) for n in layers[1].split(",") if n.strip())
            sparse = layer_plan(depth, numbers, int(wait[1])).sparse_layers
            words = ", ".join(map(str, numbers))
            found[column[1]] = f"{{{words}}}, {depth - len(sparse)} full layers"
    return "; ".join(f"{name}: {words}" for name, words in found.items())


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print the report. Exit code 0, 1 (the run failed), 2 (usage) or 130 (Ctrl-C)."""
    args = arguments(argv)
    return guarded(lambda: run(args), f"stopped; the same command goes on from {args.out / FILE}")
