"""Find filter layers by brute force over the tasks, and write omnikv.json."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from engine import LLM, Full, OmniKV
from engine.methods.base import Method
from engine.plan.layers import layer_plan
from tools.common.arguments import command
from tools.common.program import entry, replace_json
from tools.compare.turns import Turns
from tools.studies.prefill.quality import score as exact
from tools.tasks import MAIN, TASKS, make_sample
from tools.tasks.prompts import token_counter
from weights.fingerprint import fingerprint

Table = dict[str, dict[str, list[int]]]  # {setting: {task: [right, asked]}}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command(
        "python -m tools.studies.pocket.filters",
        "Find a model's filter layers by brute force over the tasks.",
    )
    parser.add_argument("folder", type=Path, help="a model in Hugging Face layout")
    parser.add_argument("--length", type=int, default=2048, help="tokens per document")
    parser.add_argument("--documents", type=int, default=4, help="per task")
    parser.add_argument("--questions", type=int, default=4, help="per document, at most")
    parser.add_argument("--most", type=int, default=2, help="most filter layers in a set")
    parser.add_argument(
        "--wait", type=int, nargs="+", default=[0, 1], help="numbers of wait layers"
    )
    parser.add_argument("--share", type=float, default=0.0667, help="budget, share of the prompt")
    parser.add_argument("--tasks", nargs="+", default=list(MAIN), help=f"of: {', '.join(TASKS)}")
    parser.add_argument("--dry", action="store_true", help="print the table, write nothing")
    return parser.parse_args(argv)


def score(
    llm: LLM,
    settings: Mapping[str, Method],
    tasks: Sequence[str],
    length: int,
    count: int,
    questions: int,
) -> Table:
    """Right and asked answers of every setting and task; an answer is right where every token of it
    and its end are the most likely ones behind those before. A document is read once.
    """
    tokenizer, ends = llm.tokenizer, llm.end_token_ids
    size = token_counter(tokenizer)
    table: Table = {name: {task: [0, 0] for task in tasks} for name in settings}
    for task in tasks:
        for seed in range(count):
            most = min(questions, TASKS[task].max_questions)
            sample = make_sample(task, length, size, 10_000 + seed, most)
            turns = Turns(tokenizer, sample.document, sample.questions)
            with llm.session(Full()) as session:
                session.prefill(turns.shared)
                for name, method in settings.items():
                    session.set_method(method)
                    for ids, text in zip(turns.own, sample.answers, strict=True):
                        right = tokenizer.encode(text, special=False)
                        table[name][task][0] += exact(session, ids, right, ends)[0]
                        table[name][task][1] += 1
                        session.truncate(len(turns.shared))
    return table


def candidates(
    layers: int, most: int, wait_choices: Sequence[int], share: float
) -> dict[str, Method]:
    """Every set of one to `most` filter layers that leaves at least two sparse layers."""
    out: dict[str, Method] = {}
    for size in range(1, most + 1):
        for filters in itertools.combinations(range(layers - 1), size):
            for wait in wait_choices:
                if len(layer_plan(layers, filters, wait).sparse_layers) >= 2:
                    method = OmniKV(
                        filter_layers=filters, wait_layers=wait, share=share, dense_below=0
                    )
                    out[f"{','.join(map(str, filters))} wait {wait}"] = method
    return out


def mean(row: dict[str, list[int]]) -> float:
    """Mean accuracy over tasks."""
    return sum(r / n for r, n in row.values()) / len(row)


def best(table: Table, settings: Mapping[str, Method], layers: int) -> str:
    """The name of the setting to use.

    Of the settings that answer no task worse than full attention (without any: within one point of
    the best mean), the one with the most sparse layers, then the fewest filters, then the best
    mean.
    """
    full = table["full"]
    others = [name for name in settings if name != "full"]
    close = [name for name in others if all(table[name][t][0] >= full[t][0] for t in full)]
    if not close:
        bar = max(mean(table[name]) for name in others) - 0.01
        close = [name for name in others if mean(table[name]) >= bar]

    def rank(name: str) -> tuple[int, int, float]:
        filters, wait = chosen(settings[name])
        sparse = len(layer_plan(layers, filters, wait).sparse_layers)
        return sparse, -len(filters), mean(table[name])

    return max(sorted(close, key=lambda name: -mean(table[name])), key=rank)


def chosen(method: Method) -> tuple[tuple[int, ...], int]:
    """(filter layers, wait layers) of a candidate."""
    assert isinstance(method, OmniKV)
    return tuple(method.filter_layers or ()), int(method.wait_layers or 0)


def run(args: argparse.Namespace) -> None:
    """Score every candidate, print the table and write omnikv.json."""
    began = time.monotonic()
    llm = LLM(str(args.folder), device="cpu", dtype="float32", threads=1, method=Full())
    layers = llm.config.num_layers
    settings = {"full": Full()} | candidates(layers, args.most, args.wait, args.share)
    table = score(llm, settings, args.tasks, args.length, args.documents, args.questions)
    for name in sorted(settings, key=lambda name: -mean(table[name])):
        shown = " ".join(f"{t}={r / n:.2f}" for t, (r, n) in table[name].items())
        print(f"{name:16s} mean {mean(table[name]):.3f} | {shown}")
    print(f"{time.monotonic() - began:.0f} s")
    name = best(table, settings, layers)
    print(f"chosen: {name}, full {mean(table['full']):.3f}, chosen {mean(table[name]):.3f}")
    if args.dry:
        return
    filters, wait = chosen(settings[name])
    scores = {n: {t: round(r / c, 4) for t, (r, c) in table[n].items()} for n in ("full", name)}
    data: dict[str, Any] = {
        "format": 1,
        "fingerprint": fingerprint(args.folder),
        "filter_layers": list(filters),
        "wait_layers": wait,
        "k": {"share": args.share},
        "scores": scores,
        "made_by": f"tools.studies.pocket.filters: brute force, {args.length} tokens, "
        f"{args.documents * args.questions} answers a task, share {args.share:g}",
    }
    replace_json(args.folder / "omnikv.json", data)


main = entry(arguments, run)


if __name__ == "__main__":
    sys.exit(main())
