"""Finds filter layers by brute force over the tasks: `python -m tools.pocket_filters
weights/pocket` writes omnikv.json.
"""

import argparse
import itertools
import json
import time
from pathlib import Path

import torch

from tools.pocket.simulation import Setting, Simulated, layer_roles
from tools.tasks import MAIN, TASKS, make_sample
from weights.fingerprint import fingerprint


def prompts(
    model: Simulated,
    folder: Path,
    tasks,
    length: int,
    count: int,
    questions: int,
    with_mass: bool = False,
):
    """Yields (task, prompt with the question read, its last logits, right ids) for every question;
    a document is read once.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    special = {
        name: tokenizer.token_to_id(f"<|{name}|>") for name in ("bos", "user", "assistant", "end")
    }
    for task in tasks:
        for seed in range(count):
            sample = make_sample(
                task,
                length,
                lambda text: len(encode(text)),
                10_000 + seed,
                min(questions, TASKS[task].max_questions),
            )
            document = model.read(
                [special["bos"], *encode(sample.document.rstrip() + "\n")], with_mass
            )
            for question, answer in zip(sample.questions, sample.answers, strict=True):
                prompt, last = model.extend(
                    document, [special["user"], *encode(question), special["assistant"]]
                )
                yield task, prompt, last, [*encode(answer), special["end"]]


def score(
    model: Simulated,
    folder: Path,
    settings: dict[str, Setting],
    tasks,
    length: int,
    count: int,
    questions: int,
) -> dict:
    """{setting: {task: [right, asked]}}."""
    table = {name: {task: [0, 0] for task in tasks} for name in settings}
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


def candidates(layers: int, most: int, wait_choices, share: float) -> dict[str, Setting]:
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


def mean(row: dict) -> float:
    """Mean accuracy over tasks."""
    return sum(r / n for r, n in row.values()) / len(row)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.pocket_filters", description=__doc__.splitlines()[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--documents", type=int, default=4, help="per task")
    parser.add_argument("--questions", type=int, default=4, help="per document, at most")
    parser.add_argument("--most", type=int, default=2, help="most filter layers in a set")
    parser.add_argument("--wait", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--share", type=float, default=0.0667)
    parser.add_argument("--tasks", nargs="+", default=list(MAIN))
    parser.add_argument("--dry", action="store_true", help="print the table, write nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    began, model = time.monotonic(), Simulated(args.folder)
    settings = {"full": Setting()} | candidates(model.layers, args.most, args.wait, args.share)
    table = score(
        model, args.folder, settings, args.tasks, args.length, args.documents, args.questions
    )
    ranked = sorted(settings, key=lambda name: -mean(table[name]))
    for name in ranked:
        print(
            f"{name:16s} mean {mean(table[name]):.3f} | "
            + " ".join(f"{t}={r / n:.2f}" for t, (r, n) in table[name].items())
        )
    print(f"{time.monotonic() - began:.0f} s")
    # no task worse than full attention (else: within one point of the best mean); then the most
    # sparse layers, the fewest filters
    full = table["full"]
    close = [
        name
        for name in ranked
        if name != "full" and all(table[name][t][0] >= full[t][0] for t in full)
    ]
    if not close:
        best = max(mean(table[name]) for name in settings if name != "full")
        close = [name for name in ranked if name != "full" and mean(table[name]) >= best - 0.01]
    sparse = lambda name: layer_roles(
        model.layers, settings[name].filters, settings[name].wait
    ).count("sparse")  # noqa: E731
    name = max(close, key=lambda n: (sparse(n), -len(settings[n].filters), mean(table[n])))
    print(f"chosen: {name}, full {mean(table['full']):.3f}, chosen {mean(table[name]):.3f}")
    if not args.dry:
        data = {
            "format": 1,
            "fingerprint": fingerprint(args.folder),
            "filter_layers": list(settings[name].filters),
            "wait_layers": settings[name].wait,
            "k": {"share": args.share},
            "scores": {
                n: {t: round(r / c, 4) for t, (r, c) in table[n].items()} for n in ("full", name)
            },
            "made_by": f"tools.pocket_filters: brute force, {args.length} tokens, {args.documents * args.questions} answers a task, "
            f"share {args.share:g}",
        }
        (args.folder / "omnikv.json.part").write_text(json.dumps(data, indent=1) + "\n")
        (args.folder / "omnikv.json.part").replace(args.folder / "omnikv.json")


if __name__ == "__main__":
    main()
