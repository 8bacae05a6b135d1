"""Compare methods on any model folder (default: the shipped judge),
methods x budgets x tasks x lengths.

Every document is read once for all methods that leave prefill alone; the others read it themselves.
Each question is asked in two turns: first after the document, and second after another question and
its answer. Answers go to answers.jsonl document by document, so the same command goes on where it
was stopped; documents go round tasks and lengths, so a stopped run has answers in every cell.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.base.errors import UsageError
from tools.banks.registry import FAMILIES, checked
from tools.common.arguments import JUDGED, add_flags, command, require_least, require_minutes
from tools.common.program import guarded, one_at_a_time, replace_json, say
from tools.compare.comparison import Comparison, span
from tools.compare.methods import GROUPS, REGISTRY, wanted
from tools.compare.own import load
from tools.compare.report import write
from tools.compare.run import Rules
from tools.compare.work import Bench, Clock, Inside, Order, OutOfTime, Outside
from tools.tasks import TASKS
from tools.tasks.prompts import JUDGE_HELP, JUDGES

DEFAULT_TASKS = ("passkey", "kv", "two_stage", "chains", "facts")
EPILOG = """methods:
{methods}
A method's budgets are --shares and --mem, or those after an @: omnikv@3,10 is 3% and 10% of the
prompt's tokens, omnikv@30,m75 is 30% of the tokens and 75% of full attention's bytes; quest@r20 is
the budget at which a step reads 20% of full attention's bytes, its index included; omnikv@t128 is
128 tokens at every length. The report names a budget that a method cannot reach, with the reason.
Beside OmniKV run its controls, which read what it reads and do not choose: a claim that they
satisfy too is not tested by this model. Beside methods that evict run random_eviction_all, which
evicts by chance, and random_eviction, which does so in the answer alone. At a budget of resident
bytes what evicts forgets the rest.

examples:
  python -m tools.compare --minutes 30                               the shipped judge, half an hour
  python -m tools.compare --model ../llama --lengths 8000 32000 --judge contains --answers 50
  python -m tools.compare --methods omnikv@3,6.67,30 h2o@30 --estimate   how long it would take
  python -m tools.compare --methods omnikv h2o@30 --dense-layers-kept omnikv
                                        H2O once more with the layers left dense that OmniKV reads
  python -m tools.compare --import my.py --methods mymethod@30 snapkv@30 --minutes 10
  python -m tools.compare --methods omnikv@6.67 --no-controls --bank int8 kivi4 kivi2 sign
  python -m tools.compare --methods omnikv@m50,m75 snapkv@m10,m30,m75 kvzip@m10,m30,m75 --out held
  python -m tools.compare.alone --out held    peak memory and CPU time of each, in its own process
"""


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    shown = "\n".join(
        f"  {name:<20} {entry.note} [{entry.group}]" for name, entry in REGISTRY.items()
    )
    parser = command(
        "python -m tools.compare",
        "Compare methods on a model: methods x budgets x tasks x lengths.",
        EPILOG.format(methods=shown),
    )
    _what(parser)
    _questions(parser)
    _running(parser)
    return parser.parse_args(argv)


def _what(parser: argparse.ArgumentParser) -> None:
    """The model, the methods, their budgets, the documents."""
    add = parser.add_argument
    known = f"names below, or a group: {', '.join(GROUPS)} (default: t1 others@3,10,30); full "
    known += "attention always runs, and beside OmniKV and what evicts their controls"
    add_flags(
        parser,
        "model methods import",
        model=JUDGED,
        methods=dict(default=["t1", "others@3,10,30"], help=known),
    )
    add(
        "--no-controls",
        dest="controls",
        action="store_false",
        help="leave out OmniKV with random tokens, with one and with the newest, eviction by "
        "chance, and the oracle of what chooses: no claim is then tested",
    )
    kept = (
        "run every method once more with these layers left dense: numbers, or `omnikv` for those "
    )
    add(
        "--dense-layers-kept",
        nargs="+",
        default=[],
        metavar="LAYER",
        help=f"{kept}that OmniKV reads whole",
    )
    add(
        "--bank",
        nargs="+",
        default=[],
        metavar="BANK",
        help="run full attention and OmniKV (by share) once more over these banks: int8, or a "
        f"simulated quantiser and its bits such as kivi2 (of: {', '.join(FAMILIES)})",
    )
    per_cent = dict(type=float, help="budgets in per cent of the prompt's tokens")
    add("--shares", nargs="+", default=[3, 10, 30], **per_cent)
    per_cent["help"] = "budgets in per cent of full attention's resident bytes"
    add("--mem", nargs="*", default=[30, 75], **per_cent)
    add("--tasks", nargs="+", default=list(DEFAULT_TASKS), help=f"of: {', '.join(TASKS)}")
    add("--lengths", nargs="+", type=int, default=[1024, 4096], help="document lengths in tokens")
    add_flags(parser, "filters wait tail")


def _questions(parser: argparse.ArgumentParser) -> None:
    """How many questions are asked, who reads them, and how answers are cut and judged."""
    add = parser.add_argument
    add("--answers", type=int, default=100, help="first questions per method, task and length")
    add("--questions", type=int, default=4, help="questions per document, at most")
    again = "2: every question is asked once more as a second question"
    add("--turns", type=int, choices=(1, 2), default=2, help=again)
    add(
        "--question",
        choices=("dense", "sparse"),
        default="dense",
        help="who reads the questions: full attention, or the method's own decode steps after the "
        "document (default: dense)",
    )
    add("--judge", choices=JUDGES, default="exact", help=JUDGE_HELP)
    most = "cut answers here (default: the right answer's length + 8)"
    add("--max-tokens", type=int, help=most)


def _running(parser: argparse.ArgumentParser) -> None:
    """Where and how long it runs."""
    where = "seed device dtype threads minutes estimate out fresh"
    add_flags(parser, where, out=Path("compare-out"))
    parser.add_argument(
        "--processes",
        type=int,
        help="documents at once, each with a copy of the model and one thread (default: one per "
        "core for a model of up to 100 million parameters on a CPU, else 1)",
    )


def order_of(args: argparse.Namespace) -> Order:
    """The Order that a command line asks for. Raises UsageError where it cannot be meant."""
    for task in args.tasks:
        if task not in TASKS:
            raise UsageError(f"unknown task {task!r}: one of {', '.join(TASKS)}")
    require_least(args, answers=1, questions=1, processes=1, lengths=1)
    require_minutes(args)
    REGISTRY.update(load(args.imports))
    names = wanted(args.methods, args.shares, args.mem, args.controls)
    judged = args.judge, args.max_tokens, args.seed
    rules = Rules(args.questions, args.turns, *judged, args.question)
    return Order(
        str(args.model),
        args.device,
        args.dtype,
        args.threads,
        tuple(names),
        tuple(dict.fromkeys(args.lengths)),
        tuple(args.filters) if args.filters else None,
        args.wait,
        args.tail,
        rules,
        layers_kept(args.dense_layers_kept),
        checked(args.bank),
        tuple(args.imports),
    )


def layers_kept(words: Sequence[str]) -> tuple[int, ...] | str:
    """The layers of --dense-layers-kept. Raises UsageError for a word that is none."""
    if list(words) == ["omnikv"]:
        return "omnikv"
    wrong = next((word for word in words if not word.isdecimal()), None)
    if wrong is not None:
        raise UsageError(
            f"--dense-layers-kept: found {wrong!r}, expected layer numbers, or `omnikv` alone"
        )
    return tuple(map(int, words))


def processes_of(args: argparse.Namespace, bench: Bench) -> int:
    """How many processes answer: one per core for a small model on a CPU, else 1."""
    if args.processes is not None:
        return args.processes
    small = bench.llm.device.type == "cpu" and bench.llm.config.parameters <= 100e6
    return (
        len(os.sched_getaffinity(0))
        if small and args.threads is None and hasattr(os, "sched_getaffinity")
        else 1
    )


def say_plan(comparison: Comparison, seconds: float, processes: int) -> None:
    """What will run and how long, on stderr."""
    bench = comparison.bench
    for length in sorted(bench.variants):
        columns = [v for v in bench.variants[length] if v.method is not None and not v.alias]
        run = [v.at(bench.facts(length).capacity) for v in columns]
        say(f"{length:,} tokens, {len(run)} columns: {', '.join(run)}")
        for why in dict.fromkeys(v.why for v in bench.variants[length] if v.method is None):
            missing = [v.label for v in bench.variants[length] if v.why == why]
            say(f"  not: {', '.join(missing)}: {why}")
    say(
        f"{len(comparison.todo)} documents to do, estimated {seconds / 3600:.2f} hours "
        f"({span(seconds)}) on {processes} process(es), from a timed warm-up"
    )


def run(args: argparse.Namespace, began: float) -> None:
    """Everything between the command line and the report."""
    order = order_of(args)
    bench = Bench(order)
    comparison = Comparison(args, bench, began)
    lengths = sorted({job.length for job, _ in comparison.todo})
    say(f"warming up on {bench.llm.device}: every method that is to run, once per length")
    processes = processes_of(args, bench)
    if processes > 1 and order.threads is None:
        # in this process too: its warm-up stands for the workers
        order = replace(order, threads=1)
        bench.use(order)
    try:
        stop = None if args.minutes is None else began + 60 * args.minutes
        clock = Clock(bench, args.tasks, lengths, stop)
    except OutOfTime:
        count = len(comparison.todo)
        say(
            f"stopped after {args.minutes:g} minutes with {count} of {count} documents to do: the "
            "warm-up was not over; give more --minutes, or fewer --methods or --lengths"
        )
        return
    estimated = clock.left([job for job, _ in comparison.todo], processes)
    say_plan(comparison, estimated, processes)
    if args.estimate:
        return
    held = {length: bench.bytes_held(length, args.tasks[0]) for length in order.lengths}
    config = comparison.config(held, processes, estimated)
    replace_json(args.out / "config.json", config)
    pool = Inside(bench) if processes == 1 else Outside(order, processes)
    began = time.monotonic()
    try:
        comparison.run(clock, pool)
    finally:
        pool.close()
        config["runs"][-1] |= {
            "seconds": time.monotonic() - began,
            "documents_left": comparison.left,
        }
        replace_json(args.out / "config.json", config)
        if comparison.answers.records:
            page = write(comparison.answers.records, config, args.out)
    if comparison.answers.records:
        print(page)
        print(f"report, answers and plots: {args.out}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print the report. Exit code 0, 1 (the run failed), 2 (usage) or 130 (Ctrl-C)."""
    began, args = time.monotonic(), arguments(argv)

    def work() -> None:
        with one_at_a_time(args.out):
            run(args, began)

    return guarded(work, f"stopped; the same command goes on from {args.out / 'answers.jsonl'}")
