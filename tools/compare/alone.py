"""What a column takes of a machine by itself: `python -m tools.compare.alone --out FOLDER`.

Every column of resident bytes in a comparison's folder reads a document and answers a little in a
process of its own, in the form in which it saves memory: methods that evict forget, OmniKV's sparse
layers lie in host memory. Into config.json go the most resident memory of that process since the
weights were loaded, beyond what it had before there was a model; the thread CPU time of a step; and
the K and V that are held. Then the report is written again. Linux alone; columns that were measured
are not measured again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine import LLM, Full
from engine.base.errors import EngineError, UsageError
from engine.model.tensors import random_stream
from tools.bench.shapes import shape_config
from tools.common.arguments import add_flags, command
from tools.common.program import guarded, one_at_a_time, replace_json, say
from tools.common.records import AnswerFile
from tools.common.resident import forget_peak, resident
from tools.compare.bytes import held, offloaded
from tools.compare.comparison import key_of, load_average
from tools.compare.methods import PROMPT_KEPT
from tools.compare.report import write
from tools.compare.run import Job, Paper, Rules
from tools.compare.work import WARM_NUMBER, Bench, Order

STEPS = 16  # of an answer; the first one cuts under some methods and is not timed


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command("python -m tools.compare.alone", __doc__)
    add = parser.add_argument
    add_flags(parser, "out threads", out=Path("compare-out"), threads=1)
    add("--model", help="the model that it compared, where it has moved since")
    add("--budgets", type=float, nargs="+", help="only these, in %% of resident bytes")
    add("--only-report", action="store_true", help="measure nothing, write the report again")
    return parser.parse_args(argv)


def order_of(
    args: argparse.Namespace, config: dict[str, Any], length: int, row: dict[str, Any]
) -> Order:
    """The Order of one column of a comparison."""
    settings = config["settings"]
    rules = Rules(**{key: settings[key] for key in Rules.__dataclass_fields__ if key in settings})
    names = (("full", "none", 100.0), (row["name"], row["kind"], row["budget"]))
    return Order(
        model=args.model or settings["model"],
        device="cpu",
        dtype=config["dtype"],
        threads=args.threads,
        names=tuple(dict.fromkeys(names)),
        lengths=(length,),
        filters=None if settings["filters"] is None else tuple(settings["filters"]),
        wait=settings["wait"],
        tail=settings["tail"],
        rules=rules,
    )


def measure(order: Order, task: str) -> dict[str, float]:
    """The last column of an order, in this process."""
    torch.set_num_threads(order.threads or 1)
    stream = partial(random_stream, seed=0)
    options: dict[str, Any] = dict(method=Full(), device="cpu", dtype=order.dtype, threads=1)
    small = LLM.from_stream(shape_config("tiny"), stream, max_context=256, **options)
    with small.session() as session:  # loads the kernels and torch's libraries
        session.prefill(list(range(200)))
        session.decode(1)
    del small
    before = resident("VmRSS")
    bench, (length,) = Bench(order), order.lengths
    method, capacity = bench.variants[length][-1].method, bench.facts(length).capacity
    assert method is not None  # of a column that has answered
    turns = Paper(bench.llm, Job(task, length, WARM_NUMBER, 1), order.rules).turns
    ids = turns.shared + turns.own[0]
    ids = (ids * -(-capacity // len(ids)))[:capacity]
    forget_peak()
    with offloaded(bench.llm, method, capacity).session() as session:
        session.prefill(ids[: capacity - STEPS])
        session.decode(ids[-STEPS])
        found = held(session)  # as `Held` of the comparison: after a prompt and a step
        began = time.thread_time()
        for token in ids[1 - STEPS :]:
            session.decode(token)
        seconds = time.thread_time() - began
    return {
        "peak": resident("VmHWM") - before,
        "cpu_ms": 1000 * seconds / (STEPS - 1),
        "device": found.device,
        "host": found.host,
        "load": load_average() or 0.0,
    }


def columns(
    config: dict[str, Any], budgets: Sequence[float] | None = None
) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """(label, length, row of config.json) of the columns that have no figure yet, of those at
    `budgets` and of those without one.
    """
    for label, by in config["variants"].items():
        for length, row in by.items():
            wanted = row["kind"] == "mem" and row["budget"] in (budgets or [row["budget"]])
            wanted |= row["name"] in ("full", PROMPT_KEPT)
            if wanted and "held" in row and not row.get("alias") and "alone" not in row:
                yield label, int(length), row


def apart(order: Order, task: str) -> dict[str, float]:
    """`measure` in a process of its own."""
    context = multiprocessing.get_context("spawn")
    try:
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(measure, order, task).result()
    except BrokenProcessPool:
        raise EngineError(
            f"{order.names[-1][0]}: its process ended before it had measured (out of memory?)"
        ) from None


def run(args: argparse.Namespace) -> None:
    """Measure what is missing, and write the report again."""
    path = args.out / "config.json"
    answers = AnswerFile(args.out, key_of)
    if not path.exists() or answers.load() is None:
        raise UsageError(
            f"--out: {args.out} holds no comparison; run python -m tools.compare first"
        )
    config = json.loads(path.read_text())
    todo = [] if args.only_report else list(columns(config, args.budgets))
    for number, (label, length, row) in enumerate(todo, 1):
        found = apart(order_of(args, config, length, row), config["tasks"][0])
        row["alone"] = found
        replace_json(path, config)
        say(f"{number} of {len(todo)}: {label}: {found['peak'] / 1e6:.1f} MB at most")
    print(write(answers.records, config, args.out))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the report."""
    args = arguments(argv)

    def work() -> None:
        with one_at_a_time(args.out):
            run(args)

    return guarded(work, f"stopped; the same command goes on from {args.out / 'config.json'}")


if __name__ == "__main__":
    raise SystemExit(main())
