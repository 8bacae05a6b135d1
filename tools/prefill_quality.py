"""Quality of OmniKV-prefill on the tasks of tools/tasks: `python -m tools.prefill_quality`, laid
out as the paper's Table 14.

Prompts are read under every r, selection block and dense end; answers are then scored under full
attention over the bank that this left, token by token against the right answer: exact (each of its
tokens, and the end, was the most likely) and nats per token, which also tells methods apart on a
model that answers little. What precedes every question is read once per method, up to a block's
edge that no dense end reaches, so that this is the prompt read whole.
"""

import argparse
import json
import math
import sys
import time
import warnings
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

from engine import LLM, EngineError, Full, OmniKV
from tools.bench.header import commit
from tools.eval.cli import POCKET, prompts
from tools.eval.report import wilson
from tools.tasks import MAIN, TASKS, make_sample
from weights.errors import UsageError

NEVER = 2**40  # dense_below: every decode step is exact


def arguments(argv=None):
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.prefill_quality", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--model", default=str(POCKET), help="alias, hub id or folder (default: the shipped model)"
    )
    parser.add_argument("--tasks", nargs="+", default=list(MAIN), help=f"of: {', '.join(TASKS)}")
    parser.add_argument("--length", type=int, default=2048, help="document length in tokens")
    parser.add_argument("--answers", type=int, default=32, help="per task and method")
    parser.add_argument("--questions", type=int, default=4, help="per document, at most")
    parser.add_argument("--ratios", nargs="+", type=int, default=[1, 2, 4, 8])
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
    parser.add_argument(
        "--tail",
        type=int,
        default=64,
        help="rows before a block that are always seen (blocks of a short document "
        "would otherwise see a good part of it)",
    )
    parser.add_argument(
        "--filters", type=int, nargs="+", help="filter layers (default: those the model comes with)"
    )
    parser.add_argument(
        "--wait", type=int, help="wait layers (default: those the model comes with, else 1)"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="stop after the document that passes this; every prefix is fair",
    )
    parser.add_argument("--out", type=Path, default=Path("eval-out") / "prefill")
    args = parser.parse_args(argv)
    for task in args.tasks:
        if task not in TASKS:
            parser.error(f"--tasks: found {task!r}, expected some of {', '.join(TASKS)}")
    return args


def settings(args):
    """[(name, r, block, stride, dense end, method)]; r None is dense prefill."""
    found = [("dense", None, 0, 0, 0, Full())]
    common = dict(
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
                    found.append(
                        (
                            f"r={ratio} block={block} stride={stride} end={end}",
                            ratio,
                            block,
                            stride,
                            end,
                            method,
                        )
                    )
    return found


def score(session, ids, right, ends):
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


def document(llm, args, task, seed, questions, found):
    """Records of one document: every question under every setting."""

    def count(text):
        return len(llm.tokenizer.encode(text, special=False))

    sample = make_sample(task, args.length, count, seed, questions)
    shared, own = prompts(llm, sample)
    right = [llm.tokenizer.encode(text, special=False) for text in sample.answers]
    room = len(shared) + max(map(len, own)) + max(map(len, right)) + 2
    for name, ratio, block, _, end, method in found:
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


def _without_end(method):
    return replace(method, prefill_dense_end=0)


def run(args):
    """All records, document by document, the tasks taking turns: every prefix of a run compares
    equals.
    """
    llm = LLM(
        args.model, device="cpu", dtype="float32", threads=args.threads, method=Full(), chunk=512
    )
    found, records, began = settings(args), [], time.monotonic()
    documents = []
    for task in args.tasks:
        per = min(args.questions, TASKS[task].max_questions)
        documents += [
            (number, task, min(per, args.answers - number * per))
            for number in range(-(-args.answers // per))
        ]
    for n, (number, task, questions) in enumerate(sorted(documents, key=lambda d: d[0])):
        records += document(llm, args, task, args.seed * 100_000 + number, questions, found)
        spent = time.monotonic() - began
        print(
            f"\r{n + 1}/{len(documents)} documents, {spent:.0f} s   ",
            end="",
            file=sys.stderr,
            flush=True,
        )
        if spent > 60 * args.minutes:
            break
    print(file=sys.stderr)
    return llm, found, records


def table(found, records, tasks):
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


def paired(records, name):
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


def markdown(about, found, records, tasks):
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
        "| prefill | " + " | ".join(tasks) + " | mean | won / lost |",
        "|---" * (len(tasks) + 3) + "|",
    ]
    for name, by, accuracy, nats in rows:
        cells = [f"{100 * by[task][0] / by[task][1]:.0f} ({by[task][2]:.2f})" for task in tasks]
        won, lost = paired(records, name)
        lines.append(
            "| "
            + " | ".join([name, *cells, f"{100 * accuracy:.1f} ({nats:.3f})", f"{won} / {lost}"])
            + " |"
        )
    return "\n".join(lines) + "\n"


def main(argv=None):
    """Run, write report.json and report.md, print the page; returns the exit code."""
    args = arguments(argv)
    warnings.simplefilter("ignore", UserWarning)
    try:
        llm, found, records = run(args)
        method, plan = llm.resolve_method(found[-1][-1])
    except (EngineError, UsageError) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    about = {
        "model": "weights/pocket" if args.model == str(POCKET) else Path(args.model).name,
        "commit": commit(),
        "document": f"{args.length} tokens",
        "plan": f"filters {method.filter_layers}, {plan.describe()}",
        "tail": args.tail,
        "decode": "full attention",
    }
    page = markdown(about, found, records, args.tasks)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "report.md").write_text(page)
    (args.out / "report.json").write_text(
        json.dumps({"about": about, "records": records}, indent=1) + "\n"
    )
    print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
