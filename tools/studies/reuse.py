"""The share of selected tokens that have a slot already, per group, budget
and number of slots, on a real model.

Every document of tools/tasks is read and its exact answers are fed token by token (so that a
model's mistakes do not matter); the selections of all steps are recorded and replayed through the
slot policies. Hit rates count decode steps only, after the warm-up.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from engine import LLM, OmniKV
from engine.runner.prompt import WARM
from kernels.tier.lru_slots import make_slots, plan_slots
from tools.common.arguments import add_flags, command, loaded
from tools.common.page import line, table
from tools.common.program import entry
from tools.tasks import make_sample
from tools.tasks.prompts import token_counter

TASKS = ("passkey", "kv", "two_stage", "chains", "facts", "frequent")
SLOTS = (1, 1.5, 2, 3, 4, 8)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command(
        "python -m tools.studies.reuse",
        "How many selected tokens have a slot already, on a real model.",
    )
    add_flags(parser, "model filters wait device threads")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), help="of the documents")
    parser.add_argument("--length", type=int, default=2048, help="tokens per document")
    parser.add_argument("--documents", type=int, default=2, help="per task")
    parser.add_argument(
        "--shares",
        nargs="+",
        type=float,
        default=[0.03, 0.0667, 0.13],
        help="budgets, shares of the prompt",
    )
    return parser.parse_args(argv)


def traces(
    llm: LLM, method: OmniKV, args: argparse.Namespace
) -> Iterator[dict[int, list[torch.Tensor]]]:
    """Yields {filter layer: [selection of every step]} per document, the warm-up's steps first."""
    words = llm.tokenizer
    for task in args.tasks:
        for seed in range(args.documents):
            sample = make_sample(task, args.length, token_counter(words), seed, 1)
            ids = words.encode(f"{sample.document.rstrip()}\n\n{sample.questions[0]}\n")
            answer = words.encode(sample.answers[0], special=False)
            with llm.session(method) as session:
                session.prefill(ids[:-WARM])
                found: dict[int, list[torch.Tensor]] = defaultdict(list)
                # the prompt's last tokens choose as the warm-up does
                for token in [*ids[-WARM:], *answer]:
                    session.decode(token)
                    for layer, chosen in session.selections.items():
                        found[layer].append(chosen)
                if session.stats.dense_steps:
                    raise AssertionError("a step was not sparse")
            yield found


def hit_rate(
    selections: Sequence[torch.Tensor], slots: float, keep_last: bool = False
) -> tuple[int, int]:
    """(hits, asked): how many selected tokens were in `slots` slots per selected token, exact LRU;
    keep_last: only the last selection stays.
    """
    budget = max(len(s) for s in selections)
    capacity = 1 + max(int(s.max()) for s in selections if len(s))
    state = make_slots(capacity, max(budget, int(slots * budget)), budget, "cpu")
    hits = asked = 0
    last: set[int] = set()
    for step, chosen in enumerate(selections):
        index = torch.zeros(budget, dtype=torch.int32)
        index[: len(chosen)] = chosen.int()
        before = int(state.counters[0])
        plan_slots(
            index, torch.tensor([len(chosen)], dtype=torch.int32), state, backend="reference"
        )
        now = set(chosen.tolist())
        if step >= WARM:
            asked += len(chosen)
            hits += len(now & last) if keep_last else int(state.counters[0]) - before
        last = now
    return hits, asked


def run(args: argparse.Namespace) -> None:
    """Measure and print one table."""
    llm = loaded(args, max_context=args.length + 512)
    print(
        f"{args.model}, documents of {args.length} tokens, tasks {', '.join(args.tasks)}, "
        "answers fed token by token\n"
    )
    slots = (f"LRU {s:g} x k" for s in SLOTS)
    print("\n".join(table(["share", "k", "group of layer", "last set only", *slots], ())))
    for share in args.shares:
        method = OmniKV(
            filter_layers=tuple(args.filters) if args.filters else None,
            share=share,
            wait_layers=args.wait,
            dense_below=0,
        )
        counted: dict[tuple[int, float], list[int]] = defaultdict(lambda: [0, 0])
        k = 0
        for found in traces(llm, method, args):
            for layer, selections in found.items():
                k = max(k, max(len(s) for s in selections))
                for slots in (0, *SLOTS):
                    hits, asked = hit_rate(selections, max(1, slots), keep_last=slots == 0)
                    counted[layer, slots][0] += hits
                    counted[layer, slots][1] += asked
        for layer in sorted({layer for layer, _ in counted}):
            rates = [counted[layer, slots] for slots in (0, *SLOTS)]
            shown = (f"{hits / max(1, asked):.1%}" for hits, asked in rates)
            print(line([f"{share:g}", k, layer, *shown]), flush=True)


main = entry(arguments, run)


if __name__ == "__main__":
    sys.exit(main())
