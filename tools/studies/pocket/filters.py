"""Find filter layers by brute force over the
tasks, and write omnikv.json.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tools.common.arguments import command
from tools.common.program import guarded, replace_json
from tools.studies.pocket.simulation import Prompt, Setting, Simulated, layer_roles
from tools.tasks import MAIN, TASKS, make_sample
from weights.fingerprint import fingerprint

Table = dict[str, dict[str, list[int]]]  # {setting: {task: [right, asked]}}


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command(
        "tools.studies.pocket.filters",
        "Find a model's filter layers by brute force over the tasks.",
    )
    parser.add_argument("folder", type=Path, help="a model in Hugging Face layout, without biases")
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


def prompts(
    model: Simulated,
    folder: Path,
    tasks: Sequence[str],
    length: int,
    count: int,
    questions: int,
    with_mass: bool = False,
) -> Iterator[tuple[str, Prompt, torch.Tensor, list[int]]]:
    """Yield (task, prompt with the question read, its last logits, ids of the right answer) for
    every question. Each document is read once.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def size(text: str) -> int:
        return len(encode(text))

    vocabulary = tokenizer.get_vocab()
    bos, user, assistant, end = (
        vocabulary[f"<|{name}|>"] for name in ("bos", "user", "assistant", "end")
    )
    for task in tasks:
        most = min(questions, TASKS[task].max_questions)
        for seed in range(count):
            sample = make_sample(task, length, size, 10_000 + seed, most)
            document = model.read([bos, *encode(sample.document.rstrip() + "\n")], with_mass)
            for question, answer in zip(sample.questions, sample.answers, strict=True):
                prompt, last = model.extend(document, [user, *encode(question), assistant])
                yield task, prompt, last, [*encode(answer), end]


def score(
    model: Simulated,
    folder: Path,
    settings: dict[str, Setting],
    tasks: Sequence[str],
    length: int,
    count: int,
    questions: int,
) -> Table:
    """Right and asked answers of every setting and task."""
    table: Table = {name: {task: [0, 0] for task in tasks} for name in settings}
    evicting = any(s.keep for s in settings.values())
    for task, prompt, last, right in prompts(
        model, folder, tasks, length, count, questions, evicting
    ):
        first, rest = int(last.argmax()) == right[0], torch.tensor(right[1:])
        for name, setting in settings.items():
            # the first token comes from the prompt, which every method but an evicting one reads in
            # full
            good = first and torch.equal(model.answer(prompt, right[:-1], setting).argmax(-1), rest)
            table[name][task][0] += good
            table[name][task][1] += 1
    return table


def candidates(
    layers: int, most: int, wait_choices: Sequence[int], share: float
) -> dict[str, Setting]:
    """Every set of one to `most` filter layers that leaves at least two sparse layers."""
    out = {}
    for size in range(1, most + 1):
        for filters in itertools.combinations(range(layers - 1), size):
            for wait in wait_choices:
                if layer_roles(layers, filters, wait).count("sparse") >= 2:
                    out[f"{','.join(map(str, filters))} wait {wait}"] = Setting(
                        filters, wait, share
                    )
    return out


def mean(row: dict[str, list[int]]) -> float:
    """Mean accuracy over tasks."""
    return sum(r / n for r, n in row.values()) / len(row)


def best(table: Table, settings: dict[str, Setting], layers: int) -> str:
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
        setting = settings[name]
        sparse = layer_roles(layers, setting.filters, setting.wait).count("sparse")
        return sparse, -len(setting.filters), mean(table[name])

    return max(sorted(close, key=lambda name: -mean(table[name])), key=rank)


def run(args: argparse.Namespace) -> None:
    """Score every candidate, print the table and write omnikv.json."""
    torch.set_num_threads(1)
    began, model = time.monotonic(), Simulated(args.folder)
    settings = {"full": Setting()} | candidates(model.layers, args.most, args.wait, args.share)
    table = score(
        model, args.folder, settings, args.tasks, args.length, args.documents, args.questions
    )
    for name in sorted(settings, key=lambda name: -mean(table[name])):
        shown = " ".join(f"{t}={r / n:.2f}" for t, (r, n) in table[name].items())
        print(f"{name:16s} mean {mean(table[name]):.3f} | {shown}")
    print(f"{time.monotonic() - began:.0f} s")
    name = best(table, settings, model.layers)
    print(f"chosen: {name}, full {mean(table['full']):.3f}, chosen {mean(table[name]):.3f}")
    if args.dry:
        return
    scores = {n: {t: round(r / c, 4) for t, (r, c) in table[n].items()} for n in ("full", name)}
    data: dict[str, Any] = {
        "format": 1,
        "fingerprint": fingerprint(args.folder),
        "filter_layers": list(settings[name].filters),
        "wait_layers": settings[name].wait,
        "k": {"share": args.share},
        "scores": scores,
        "made_by": f"tools.studies.pocket.filters: brute force, {args.length} tokens, "
        f"{args.documents * args.questions} answers a task, share {args.share:g}",
    }
    replace_json(args.folder / "omnikv.json", data)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (the run failed), 2 (usage) or 130 (Ctrl-C)."""
    args = arguments(argv)
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
