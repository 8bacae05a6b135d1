"""Compares methods on any model folder, methods x budgets x tasks x lengths: `python -m
tools.compare` (default: the shipped model).

Every document is read once for all methods that leave prefill alone; those that do not read it by
themselves. Each question is asked in two turns: first after the document, and second after another
question and its answer. Answers go to answers.jsonl document by document, so the same command goes
on where it was stopped; documents go round tasks and lengths, so a stopped run has answers in every
cell.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

from engine import EngineError
from tools.bench import header as bench_header
from tools.compare.methods import GROUPS, REGISTRY, wanted
from tools.compare.report import write
from tools.compare.run import Rules
from tools.compare.work import Bench, Clock, Inside, Order, Outside, jobs
from tools.eval.cli import POCKET
from tools.tasks import TASKS
from weights.errors import UsageError
from weights.fingerprint import weights_digest

DEFAULT_TASKS = ("passkey", "kv", "two_stage", "chains", "facts")
EPILOG = """methods:
{methods}
A method's budgets are --shares and --mem, or its own after an @: omnikv@3,10 is 3% and 10% of the prompt's tokens, omnikv@30,m75 is
30% of the tokens and 75% of full attention's bytes. A budget that a method cannot reach is named in the report with the reason.

examples:
  python -m tools.compare --minutes 30                               the shipped model, half an hour
  python -m tools.compare --model ../my-llama --lengths 8000 32000 --judge contains --answers 50
  python -m tools.compare --methods omnikv@3,6.67,30 h2o@30 --estimate   how long it would take
"""


def arguments(argv=None) -> argparse.Namespace:
    """The command line."""
    shown = "\n".join(
        f"  {name:<20} {entry.note} [{entry.group}]" for name, entry in REGISTRY.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m tools.compare",
        description=__doc__.splitlines()[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG.format(methods=shown),
    )
    parser.add_argument(
        "--model", default=str(POCKET), help="alias, hub id or folder (default: the shipped model)"
    )
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["t1", "others@30"],
        metavar="NAME[@BUDGETS]",
        help=f"names below, or a group: {', '.join(GROUPS)} (default: t1 others@30); full attention always runs",
    )
    parser.add_argument(
        "--shares",
        nargs="+",
        type=float,
        default=[3, 10, 30],
        help="budgets in per cent of the prompt's tokens",
    )
    parser.add_argument(
        "--mem",
        nargs="*",
        type=float,
        default=[30, 75],
        help="budgets in per cent of full attention's resident bytes",
    )
    parser.add_argument(
        "--tasks", nargs="+", default=list(DEFAULT_TASKS), help=f"of: {', '.join(TASKS)}"
    )
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[1024, 4096], help="document lengths in tokens"
    )
    parser.add_argument(
        "--answers", type=int, default=100, help="first questions per method, task and length"
    )
    parser.add_argument("--questions", type=int, default=4, help="questions per document, at most")
    parser.add_argument(
        "--turns",
        type=int,
        choices=(1, 2),
        default=2,
        help="2: every question is asked once more as a second question",
    )
    parser.add_argument(
        "--filters",
        type=int,
        nargs="+",
        help="OmniKV's filter layers (default: those the model comes with)",
    )
    parser.add_argument(
        "--wait",
        type=int,
        help="OmniKV's wait layers (default: those the model comes with, else 1)",
    )
    parser.add_argument(
        "--tail",
        type=int,
        default=64,
        help="newest tokens that OmniKV's layers always see, outside its budget",
    )
    parser.add_argument(
        "--judge",
        choices=("exact", "contains"),
        default="exact",
        help="exact: the whole answer; contains: the value stands in it (for models that answer in their own words)",
    )
    parser.add_argument(
        "--max-tokens", type=int, help="cut answers here (default: the right answer's length + 8)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, help="CPU threads of each process")
    parser.add_argument(
        "--processes",
        type=int,
        help="documents at once, each with a copy of the model and one thread (default: one per "
        "core for a model of up to 100 million parameters on a CPU, else 1)",
    )
    parser.add_argument(
        "--minutes", type=float, help="stop at a whole document before this many minutes are over"
    )
    parser.add_argument(
        "--estimate",
        action="store_true",
        help="print what would run and how long it would take, and stop",
    )
    parser.add_argument("--out", type=Path, default=Path("compare-out"))
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start over instead of going on with the answers in --out",
    )
    return parser.parse_args(argv)


def order_of(args) -> Order:
    """The command line checked: UsageError where it asks for what there is not."""
    for task in args.tasks:
        if task not in TASKS:
            raise UsageError(f"unknown task {task!r}: one of {', '.join(TASKS)}")
    for name in ("answers", "questions", "processes"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name}: found {getattr(args, name)}, expected at least 1")
    if min(args.lengths) < 1:
        raise UsageError(f"--lengths: found {min(args.lengths)}, expected at least 1")
    if args.minutes is not None and not args.minutes > 0:
        raise UsageError(f"--minutes: found {args.minutes:g}, expected a number above 0")
    names = wanted(args.methods, args.shares, args.mem)
    rules = Rules(args.questions, args.turns, args.judge, args.max_tokens, args.seed)
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
    )


class Comparison:
    """One run: the answers that exist, the documents still to do, the configuration saved beside
    them.
    """

    def __init__(self, args, bench, began):
        self.args, self.bench, self.began = args, bench, began
        self.path = args.out / "answers.jsonl"
        self.records, self.done = [], set()
        order = bench.order
        # wherever this folder lies: the digest says which training it is
        shipped = args.model == str(POCKET)
        settings = {
            "model": "weights/pocket" if shipped else args.model,
            "weights": weights_digest(bench.llm.folder),
            "dtype": args.dtype,
            **asdict(order.rules),
            "filters": order.filters,
            "wait": order.wait,
            "tail": order.tail,
        }
        # as they are read back: tuples are lists
        self.settings = json.loads(json.dumps(settings))
        self.methods = {
            f"{v.label} @ {length}": repr(v.method)
            for length, found in bench.variants.items()
            for v in found
            if v.method
        }
        args.out.mkdir(parents=True, exist_ok=True)
        self._resume()
        self.todo = [
            (job, skip)
            for job in jobs(args.tasks, order.lengths, args.answers, args.questions)
            if (skip := self._answered(job)) is not None
        ]

    def _resume(self):
        if self.path.exists() and not self.args.fresh:
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except ValueError:  # the last line of a run that was killed
                    continue
                if "settings" in record:
                    self._same(record)
                elif self._key(record) not in self.done:
                    self.records.append(record)
                    self.done.add(self._key(record))
        part = self.path.with_suffix(".part")
        lines = [
            json.dumps({"settings": self.settings, "methods": self.methods}),
            *map(json.dumps, self.records),
        ]
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")
        part.replace(self.path)

    def _same(self, header):
        """The answers there are go with this run, or UsageError."""
        other = {k: v for k, v in header["settings"].items() if self.settings.get(k) != v}
        if other:
            raise UsageError(
                f"{self.path} holds answers of other settings ({other}): use --fresh or another --out"
            )
        moved = next((k for k, v in header["methods"].items() if self.methods.get(k, v) != v), None)
        if moved:
            raise UsageError(
                f"{self.path}: {moved} was {header['methods'][moved]} and is {self.methods[moved]} now: use --fresh or "
                "another --out"
            )
        self.methods = header["methods"] | self.methods

    @staticmethod
    def _key(r):
        return r["variant"], r["task"], r["length"], r["seed"], r["question"], r["turn"]

    def _answered(self, job):
        """Labels of variants that have all their answers about this document; None where all have."""
        seed = self.args.seed * 100_000 + job.number
        per = min(self.args.questions, TASKS[job.task].max_questions)
        wanted = [(q, 1) for q in range(job.conversations)]
        if self.args.turns > 1 and per > 1:
            wanted += [((q + 1) % per, 2) for q in range(job.conversations)]
        run = [
            v.label for v in self.bench.variants[job.length] if v.method is not None and not v.alias
        ]
        found = {
            label
            for label in run
            if all((label, job.task, job.length, seed, *w) in self.done for w in wanted)
        }
        return None if len(found) == len(run) else tuple(sorted(found))

    def run(self, clock, pool):
        """Do the documents in order until there are none, or none that would end in time."""
        total, finished, given = len(self.todo), 0, []
        waiting = [job for job, _ in self.todo]
        self.left = total
        with open(self.path, "a", encoding="utf-8") as file:
            while waiting or given:
                while waiting and len(given) < pool.processes and self._in_time(clock, waiting[0]):
                    job = waiting.pop(0)
                    given.append(job)
                    pool.give(job, next(skip for j, skip in self.todo if j is job))
                if not given:
                    break
                job, records, seconds = pool.take()
                given.remove(job)
                finished += 1
                self.left = total - finished
                clock.done(job, seconds)
                self._keep(file, records)
                self._say(
                    f"{finished}/{total} documents, {time.monotonic() - self.began:.0f} s, about "
                    f"{span(clock.left([*given, *waiting], pool.processes))} left"
                )
        print(file=sys.stderr)
        if waiting:
            print(
                f"stopped after {self.args.minutes:g} minutes with {len(waiting)} of {total} documents to do; the same command goes on",
                file=sys.stderr,
            )

    def _in_time(self, clock, job):
        spent = time.monotonic() - self.began
        return self.args.minutes is None or spent + clock.expected(job) <= 60 * self.args.minutes

    def _keep(self, file, records):
        fresh = [r for r in records if self._key(r) not in self.done]
        file.write("".join(json.dumps(r) + "\n" for r in fresh))
        file.flush()
        self.records += fresh
        self.done.update(map(self._key, fresh))

    def _say(self, text):
        print(f"\r{text}   ", end="", file=sys.stderr, flush=True)

    def config(self, held, processes, estimated):
        """What runs, resolved: written beside the answers, with the runs that these came from."""
        llm, args, path = self.bench.llm, self.args, self.args.out / "config.json"
        before = (
            json.loads(path.read_text())
            if path.exists() and self.records
            else {"variants": {}, "runs": []}
        )
        this = {
            "commit": bench_header.commit(),
            "hardware": bench_header.hardware(llm.device),
            "load": load_average(),
            "processes": processes,
            "threads": self.bench.order.threads,
            "documents": len(self.todo),
            "estimated_seconds": estimated,
            "flags": " ".join(bench_header.flags_given()),
            "packages": {p: bench_header.version(p) for p in bench_header.PACKAGES},
        }
        # columns of earlier runs stay in the report
        variants = before["variants"]
        for length, found in self.bench.variants.items():
            for v in found:
                row = {
                    "name": v.name,
                    "kind": v.kind,
                    "budget": v.budget,
                    "reads": v.entry.reads,
                    "evicts": v.entry.evicts,
                    "group": v.entry.group,
                }
                if v.method is None:
                    row["why"] = v.why
                else:
                    row |= {"method": repr(v.method), "alias": v.alias}
                    row |= {"held": held[length][v.alias or v.label].to_dict()}
                variants.setdefault(v.label, {})[str(length)] = row
        return {
            "model": self.settings["model"],
            "settings": self.settings,
            "variants": variants,
            "device": str(llm.device),
            "dtype": str(llm.dtype).removeprefix("torch."),
            "answers": args.answers,
            "tasks": args.tasks,
            "lengths": sorted(self.bench.order.lengths),
            "runs": [*before["runs"], this],
        }


def load_average():
    """Programs that ran on this machine in the last minute, as the system counts them; None where
    it does not.
    """
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None


def processes_of(args, bench):
    """How many processes answer."""
    if args.processes is not None:
        return args.processes
    small = bench.llm.device.type == "cpu" and bench.llm.config.parameters <= 100e6
    return (
        len(os.sched_getaffinity(0))
        if small and args.threads is None and hasattr(os, "sched_getaffinity")
        else 1
    )


def span(seconds):
    """A length of time for people."""
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )


def say_plan(comparison, seconds, processes):
    """What will run and how long, on stderr."""
    bench = comparison.bench
    for length in sorted(bench.variants):
        run = [v.label for v in bench.variants[length] if v.method is not None and not v.alias]
        print(f"{length:,} tokens, {len(run)} columns: {', '.join(run)}", file=sys.stderr)
        for why in dict.fromkeys(v.why for v in bench.variants[length] if v.method is None):
            print(
                f"  not: {', '.join(v.label for v in bench.variants[length] if v.why == why)}: {why}",
                file=sys.stderr,
            )
    print(
        f"{len(comparison.todo)} documents to do, estimated {seconds / 3600:.2f} hours ({span(seconds)}) on {processes} process(es), "
        "from a timed warm-up",
        file=sys.stderr,
    )


def run(args, began) -> None:
    """Everything between the command line and the report."""
    order = order_of(args)
    bench = Bench(order)
    comparison = Comparison(args, bench, began)
    print(f"warming up on {bench.llm.device}: every method at every length, once", file=sys.stderr)
    processes = processes_of(args, bench)
    if processes > 1 and order.threads is None:
        # also of this process, whose warm-up stands for what the workers do
        order = replace(order, threads=1)
        bench.use(order)
    clock = Clock(bench, args.tasks)
    estimated = clock.left([job for job, _ in comparison.todo], processes)
    say_plan(comparison, estimated, processes)
    if args.estimate:
        return
    held = {length: bench.bytes_held(length, args.tasks[0]) for length in order.lengths}
    config = comparison.config(held, processes, estimated)
    store(args.out / "config.json", config)
    pool, began = Inside(bench) if processes == 1 else Outside(order, processes), time.monotonic()
    try:
        comparison.run(clock, pool)
    finally:
        pool.close()
        config["runs"][-1] |= {
            "seconds": time.monotonic() - began,
            "documents_left": comparison.left,
        }
        store(args.out / "config.json", config)
        if comparison.records:
            page = write(comparison.records, config, args.out)
    if comparison.records:
        print(page)
        print(f"report, answers and plots: {args.out}")


def store(path, data) -> None:
    """JSON, written beside and renamed."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def main(argv=None) -> int:
    """Run, print the report, return the exit code."""
    began, args = time.monotonic(), arguments(argv)
    try:
        run(args, began)
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(
            f"\nstopped; the same command goes on from {args.out / 'answers.jsonl'}",
            file=sys.stderr,
        )
        return 130
    return 0
