"""How much of a selection was there already: reuse per group, budget and number of slots, on a real
model: `python -m tools.reuse`.

Every document of tools/tasks is read and its exact answers are fed token by token (so that a
model's mistakes do not matter); the selections of all steps are recorded and replayed through the
slot policies. Hit rates count decode steps only, after the warm-up.
"""

import argparse
import sys
from collections import defaultdict

import torch

import engine.session
from engine import LLM, EngineError, OmniKV
from kernels.slots import make_slots, plan_slots
from tools.eval.cli import POCKET
from tools.tasks import make_sample

TASKS = ("passkey", "kv", "two_stage", "chains", "facts", "frequent")
SLOTS = (1, 1.5, 2, 3, 4, 8)


def arguments(argv=None):
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.reuse", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--model", default=str(POCKET), help="alias, hub id or folder (default: the shipped model)"
    )
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--length", type=int, default=2048, help="tokens per document")
    parser.add_argument("--documents", type=int, default=2, help="per task")
    parser.add_argument(
        "--shares",
        nargs="+",
        type=float,
        default=[0.03, 0.0667, 0.13],
        help="budgets, shares of the prompt",
    )
    parser.add_argument(
        "--filters", type=int, nargs="+", help="filter layers (default: those the model comes with)"
    )
    parser.add_argument(
        "--wait", type=int, help="wait layers (default: those the model comes with, else 1)"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int)
    return parser.parse_args(argv)


def traces(llm, method, args):
    """Yields {filter layer: [selection of every step]} per document, the warm-up's steps first."""
    words = llm.tokenizer
    for task in args.tasks:
        for seed in range(args.documents):
            sample = make_sample(
                task, args.length, lambda text: len(words.encode(text, special=False)), seed, 1
            )
            ids = words.encode(f"{sample.document.rstrip()}\n\n{sample.questions[0]}\n")
            answer = words.encode(sample.answers[0], special=False)
            with llm.session(method) as session:
                session.prefill(ids[: -engine.session.WARM])
                found = defaultdict(list)
                # the prompt's last tokens choose as the warm-up does
                for token in [*ids[-engine.session.WARM :], *answer]:
                    session.decode(token)
                    for layer, chosen in session.selections.items():
                        found[layer].append(chosen)
                if session.stats.dense_steps:
                    raise AssertionError("a step was not sparse")
            yield found


def hit_rate(selections, slots, keep_last=False):
    """Share of selected tokens that were in `slots` slots per selected token, exact LRU; keep_last:
    only the last selection stays.
    """
    budget = max(len(s) for s in selections)
    capacity = 1 + max(int(s.max()) for s in selections if len(s))
    state = make_slots(capacity, max(budget, int(slots * budget)), budget, "cpu")
    hits = asked = 0
    last = set()
    for step, chosen in enumerate(selections):
        index = torch.zeros(budget, dtype=torch.int32)
        index[: len(chosen)] = chosen.int()
        before = int(state.counters[0])
        plan_slots(
            index, torch.tensor([len(chosen)], dtype=torch.int32), state, backend="reference"
        )
        now = set(chosen.tolist())
        if step >= engine.session.WARM:
            asked += len(chosen)
            hits += len(now & last) if keep_last else int(state.counters[0]) - before
        last = now
    return hits, asked


def main(argv=None):
    """Measure and print one table; returns the exit status."""
    args = arguments(argv)
    try:
        llm = LLM(
            args.model, device=args.device, threads=args.threads, max_context=args.length + 512
        )
        print(
            f"{args.model}, documents of {args.length} tokens, tasks {', '.join(args.tasks)}, "
            "answers fed token by token\n"
        )
        print(
            "| share | k | group of layer | last set only | "
            + " | ".join(f"LRU {s:g} x k" for s in SLOTS)
            + " |"
        )
        print("|---" * (4 + len(SLOTS)) + "|")
        for share in args.shares:
            method = OmniKV(
                filter_layers=tuple(args.filters) if args.filters else None,
                share=share,
                wait_layers=args.wait,
                dense_below=0,
            )
            counted, k = defaultdict(lambda: [0, 0]), 0
            for found in traces(llm, method, args):
                for layer, selections in found.items():
                    k = max(k, max(len(s) for s in selections))
                    for slots in (0, *SLOTS):
                        hits, asked = hit_rate(selections, max(1, slots), keep_last=slots == 0)
                        counted[layer, slots][0] += hits
                        counted[layer, slots][1] += asked
            for layer in sorted({layer for layer, _ in counted}):
                rates = [counted[layer, slots] for slots in (0, *SLOTS)]
                print(
                    f"| {share:g} | {k} | {layer} | "
                    + " | ".join(f"{h / max(1, n):.1%}" for h, n in rates)
                    + " |",
                    flush=True,
                )
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
