"""Accuracy of sparse prefill (OmniKV-prefill) on the tasks of
tools/tasks, laid out as the paper's Table 14.

Prompts are read under every r, selection block and dense end; answers are then scored under full
attention over the bank that this left, token by token against the right answer: exact (each of its
tokens, and the end, was the most likely) and nats per token, which also tells settings apart on a
model that answers little. The beginning that all questions share is read once per setting, up to a
block's edge that no dense end reaches: the same as reading each prompt whole.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine import LLM, Full, OmniKV
from engine.methods.base import Method
from engine.session.session import Session
from tools.bench.header import commit
from tools.common import page
from tools.common.arguments import JUDGED, add_flags, command, loaded
from tools.common.intervals import wilson
from tools.common.program import JUDGE, entry, progress, replace_json, say
from tools.compare.turns import Turns
from tools.tasks import MAIN, TASKS, make_sample
from tools.tasks.prompts import token_counter

NEVER = 2**40  # dense_below: every decode step is exact


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command(
        "python -m tools.studies.prefill.quality",
        "Accuracy of sparse prefill on tasks with exact answers.",
    )
    add_flags(
        parser,
        "model tail filters wait seed threads minutes out",
        model=JUDGED,
        seed=7,
        minutes=math.inf,
        out=Path("eval-out") / "prefill",
    )
    parser.add_argument("--tasks", nargs="+", default=list(MAIN), help=f"of: {', '.join(TASKS)}")
    parser.add_argument("--length", type=int, default=2048, help="document length in tokens")
    parser.add_argument("--answers", type=int, default=32, help="per task and method")
    parser.add_argument("--questions", type=int, default=4, help="per document, at most")
    parser.add_argument(
        "--ratios", nargs="+", type=int, default=[1, 2, 4, 8], help="r of OmniKV-prefill"
    )
    parser.add_argument(
        "--blocks", nargs="+", type=int, default=[64, 128, 256], help="queries per selection"
    )
    parser.add_argument(
        "--strides", nargs="+", type=int, default=[1], help="every n-th query of a block scores"
    )
    parser.add_argument(
        "--dense-end",
        type=int,
        default=512,
        help="tokens read densely at the prompt's end, compared with none",
    )
    args = parser.parse_args(argv)
    for task in args.tasks:
        if task not in TASKS:
            parser.error(f"--tasks: found {task!r}, expected some of {', '.join(TASKS)}")
    return args


class Setting(NamedTuple):
    """One row of the table; ratio None is dense prefill."""

    name: str
    ratio: int | None
    block: int
    end: int
    method: Method


def settings(args: argparse.Namespace) -> list[Setting]:
    """Dense prefill, then every block, stride, dense end and ratio."""
    found = [Setting("dense", None, 0, 0, Full())]
    common: dict[str, Any] = dict(
        filter_layers=tuple(args.filters) if args.filters else None,
        wait_layers=args.wait,
        tail=args.tail,
        dense_below=NEVER,
    )
    for block in args.blocks:
        for stride in args.strides:
            for end in (args.dense_end, 0):
                for ratio in args.ratios:
                    method = OmniKV(
                        prefill_ratio=ratio,
                        prefill_block=block,
                        prefill_stride=stride,
                        prefill_dense_end=end,
                        **common,
                    )
                    name = f"r={ratio} block={block} stride={stride} end={end}"
                    found.append(Setting(name, ratio, block, end, method))
    return found


def score(
    session: Session, ids: Sequence[int], right: Sequence[int], ends: Sequence[int]
) -> tuple[bool, float]:
    """(exact, nats) of the right answer's tokens after a prompt's last part, every step under full
    attention.
    """
    logits, nats, exact = session.prefill(ids), 0.0, True
    for n, token in enumerate(right):
        nats -= float(torch.log_softmax(logits, -1)[token])
        exact &= int(logits.argmax()) == token
        if n + 1 < len(right) or exact:
            logits = session.decode(token)
    return bool(exact and (not ends or int(logits.argmax()) in ends)), nats


def document(
    llm: LLM,
    args: argparse.Namespace,
    task: str,
    seed: int,
    questions: int,
    found: Sequence[Setting],
) -> Iterator[dict[str, Any]]:
    """Yield the records of one document: every question under every setting."""
    count = token_counter(llm.tokenizer)
    sample = make_sample(task, args.length, count, seed, questions)
    turns = Turns(llm.tokenizer, sample.document, sample.questions)
    shared, own = turns.shared, turns.own
    right = [llm.tokenizer.encode(text, special=False) for text in sample.answers]
    room = len(shared) + max(map(len, own)) + max(map(len, right)) + 2
    for name, ratio, block, end, method in found:
        edge = max(0, len(shared) - args.dense_end) // (block or 1) * (block or 1)
        with llm.session(
            method if ratio is None else _without_end(method),
            max_context=min(llm.max_context, room),
        ) as session:
            if edge:
                session.prefill(shared[:edge])
            before = session.runtime.prefill.rows_read if ratio else 0
            if ratio and end:
                session.set_method(method)
            for n, ids in enumerate(own):
                exact, nats = score(session, shared[edge:] + ids, right[n], llm.end_token_ids)
                session.truncate(edge)
                yield {
                    "setting": name,
                    "task": task,
                    "seed": seed,
                    "question": n,
                    "right": int(exact),
                    "nats": nats / len(right[n]),
                    "rows": before,
                }


def _without_end(method: Method) -> Method:
    return replace(method, prefill_dense_end=0)


def measure(
    args: argparse.Namespace,
) -> tuple[LLM, list[Setting], list[dict[str, Any]]]:
    """(the model, the settings, all records). The tasks take turns, document by document, so that
    every prefix of a run compares equals.
    """
    llm = loaded(args, device="cpu", dtype="float32", chunk=512)
    found, began = settings(args), time.monotonic()
    records: list[dict[str, Any]] = []
    documents: list[tuple[int, str, int]] = []
    for task in args.tasks:
        per = min(args.questions, TASKS[task].max_questions)
        documents += [
            (number, task, min(per, args.answers - number * per))
            for number in range(-(-args.answers // per))
        ]
    for n, (number, task, questions) in enumerate(sorted(documents, key=lambda d: d[0])):
        records += document(llm, args, task, args.seed * 100_000 + number, questions, found)
        spent = time.monotonic() - began
        progress(f"{n + 1}/{len(documents)} documents, {spent:.0f} s")
        if spent > 60 * args.minutes:
            break
    say("")
    return llm, found, records


def table(
    found: Sequence[Setting], records: Sequence[dict[str, Any]], tasks: Sequence[str]
) -> list[tuple[str, dict, float, float]]:
    """Rows of Table 14: (setting, {task: (right, asked, nats)}, mean accuracy, mean nats)."""
    cells = defaultdict(list)
    for r in records:
        cells[r["setting"], r["task"]].append(r)
    rows = []
    for name, *_ in found:
        by = {}
        for task in tasks:
            mine = cells[name, task]
            if mine:
                by[task] = (
                    sum(r["right"] for r in mine),
                    len(mine),
                    sum(r["nats"] for r in mine) / len(mine),
                )
        accuracy = sum(right / asked for right, asked, _ in by.values()) / len(by)
        rows.append((name, by, accuracy, sum(nats for *_, nats in by.values()) / len(by)))
    return rows


def paired(records: Sequence[dict[str, Any]], name: str) -> tuple[int, int]:
    """(won, lost) answers of a setting against dense prefill on the same questions."""
    dense = {
        (r["task"], r["seed"], r["question"]): r["right"]
        for r in records
        if r["setting"] == "dense"
    }
    mine = [
        (r["right"], dense[r["task"], r["seed"], r["question"]])
        for r in records
        if r["setting"] == name
    ]
    return sum(a > b for a, b in mine), sum(a < b for a, b in mine)


def markdown(
    about: dict[str, Any],
    found: Sequence[Setting],
    records: Sequence[dict[str, Any]],
    tasks: Sequence[str],
) -> str:
    """The report as a page."""
    tasks = [task for task in tasks if any(r["task"] == task for r in records)]
    rows = table(found, records, tasks)
    asked = sum(asked for _, asked, _ in rows[0][1].values())
    low, high = wilson(sum(right for right, _, _ in rows[0][1].values()), asked)
    lines = [
        "# Quality of OmniKV-prefill",
        "",
        *(f"- {key}: {value}" for key, value in about.items()),
        "",
        f"Exact answers in percent and, in brackets, nats per answer token; {asked} answers per "
        "row (95% interval of dense prefill "
        f"over all: {100 * low:.0f}..{100 * high:.0f}%). won / lost: answers against dense "
        "prefill, same questions.",
        "",
    ]
    cells = []
    for name, by, accuracy, nats in rows:
        own = [f"{100 * by[task][0] / by[task][1]:.0f} ({by[task][2]:.2f})" for task in tasks]
        won, lost = paired(records, name)
        cells.append((name, *own, f"{100 * accuracy:.1f} ({nats:.3f})", f"{won} / {lost}"))
    lines += page.table(["prefill", *tasks, "mean", "won / lost"], cells)
    return "\n".join(lines) + "\n"


def run(args: argparse.Namespace) -> None:
    """Measure, write report.json and report.md, print the page."""
    llm, found, records = measure(args)
    method, plan = llm.resolve_method(found[-1].method)
    about = {
        "model": f"weights/{JUDGE.name}" if args.model == str(JUDGE) else Path(args.model).name,
        "commit": commit(),
        "document": f"{args.length} tokens",
        "plan": f"filters {getattr(method, 'filter_layers', None)}, {plan.describe()}",
        "tail": args.tail,
        "decode": "full attention",
    }
    text = markdown(about, found, records, args.tasks)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "report.md").write_text(text)
    replace_json(args.out / "report.json", {"about": about, "records": records})
    print(text)


main = entry(arguments, run, quiet=True)


if __name__ == "__main__":
    sys.exit(main())
