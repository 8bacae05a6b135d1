"""Score full attention and OmniKV on any model folder over the tasks of
tools/tasks (default: the shipped model).

Every document is read once; each method then answers each question from that same bank. Answers go
to answers.jsonl one by one, so the same command goes on where it was stopped. OmniKV runs with
dense_below=0, and it is asserted that its steps were sparse.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engine import LLM, Full, OmniKV
from engine.base.errors import UsageError
from engine.methods.base import Method
from engine.session.session import Session
from tools.common.program import POCKET, guarded, model_label, progress, say
from tools.eval.answers import AnswerFile, Record, require_same
from tools.eval.prompts import (
    JUDGE_HELP,
    JUDGES,
    answer_text,
    is_right,
    split_prompts,
    token_counter,
)
from tools.eval.report import write
from tools.tasks import MAIN, TASKS, make_sample
from weights.fingerprint import weights_digest

SPARE = 8  # tokens that an answer may be longer than the right one before it is cut
# settings that must be equal to go on from earlier answers
SETTINGS = ("model", "questions", "filters", "wait", "selector", "judge", "max_tokens", "seed")


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.eval",
        description="Score full attention and OmniKV on a model over tasks with exact answers.",
    )
    parser.add_argument(
        "--model", default=str(POCKET), help="alias, hub id or folder (default: the shipped model)"
    )
    parser.add_argument("--tasks", nargs="+", default=list(MAIN), help=f"of: {', '.join(TASKS)}")
    parser.add_argument(
        "--lengths", nargs="+", type=int, default=[1024, 4096], help="document lengths in tokens"
    )
    parser.add_argument("--answers", type=int, default=24, help="per task, length and method")
    parser.add_argument("--questions", type=int, default=4, help="per document, at most")
    parser.add_argument(
        "--shares",
        nargs="*",
        type=float,
        default=[0.0667],
        help="OmniKV budgets, shares of the prompt (none: full only)",
    )
    parser.add_argument(
        "--filters",
        type=int,
        nargs="+",
        help="OmniKV filter layers (default: those the model comes with)",
    )
    parser.add_argument(
        "--wait", type=int, help="OmniKV wait layers (default: those the model comes with, else 0)"
    )
    parser.add_argument(
        "--selector",
        default="last",
        choices=("last", "uniform", "exponential"),
        help="which queries OmniKV's filter layers select by (default last)",
    )
    parser.add_argument(
        "--judge",
        choices=JUDGES,
        default="exact",
        help=JUDGE_HELP,
    )
    parser.add_argument(
        "--max-tokens", type=int, help="cut answers here (default: the right answer's length + 8)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the documents")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="auto", help="auto, bfloat16, float16 or float32")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument(
        "--out", type=Path, default=Path("eval-out"), help="folder (default: eval-out)"
    )
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start over instead of going on with the answers in --out",
    )
    return parser.parse_args(argv)


def methods(args: argparse.Namespace) -> dict[str, Method]:
    """{name: method}: full attention first, then OmniKV at every share."""
    filters = tuple(args.filters) if args.filters else None
    found: dict[str, Method] = {"full": Full()}
    for share in args.shares:
        found[f"omnikv {100 * share:g}%"] = OmniKV(
            filter_layers=filters,
            share=share,
            wait_layers=args.wait,
            selector=args.selector,
            dense_below=0,
        )
    return found


def answer(session: Session, ids: Sequence[int], most: int, sparse: bool) -> list[int]:
    """At most `most` greedy tokens of an answer, the end token left out. Raises AssertionError
    where `sparse` and a step was not.
    """
    before = session.stats
    out: list[int] = []
    logits = session.prefill(ids)
    while len(out) < most:
        token = int(logits.argmax())
        if token in session.loaded.end_token_ids:
            break
        out.append(token)
        if len(out) < most:
            logits = session.decode(token)
    after = session.stats
    steps, were = after.decode_steps - before.decode_steps, after.sparse_steps - before.sparse_steps
    if sparse and steps != were:
        raise AssertionError(f"{steps - were} of {steps} decode steps were not sparse")
    return out


class Evaluation:
    """One run: the model, the methods and the answers there are."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        for task in args.tasks:
            if task not in TASKS:
                raise UsageError(f"unknown task {task!r}: one of {', '.join(TASKS)}")
        if args.answers < 1 or args.questions < 1:
            raise UsageError("--answers and --questions are at least 1")
        self.llm = LLM(
            args.model, device=args.device, dtype=args.dtype, threads=args.threads, method=Full()
        )
        limit = self.llm.max_context
        if max(args.lengths) + 256 > limit:
            raise UsageError(
                f"documents of {max(args.lengths)} tokens and 256 for question and answer "
                f"do not fit the {limit} tokens this model can hold here"
            )
        self.methods = methods(args)
        self.settings = {key: getattr(args, key) for key in (*SETTINGS, "dtype")} | {
            "weights": weights_digest(self.llm.folder)
        }
        self.answers = AnswerFile(args.out, _key)
        header = None if args.fresh else self.answers.load()
        if header is not None:
            require_same(self.answers.path, header["settings"], self.settings)
        self.answers.start({"settings": self.settings})

    def documents(self) -> list[tuple[str, int, int, int]]:
        """(task, length, seed, questions) of all documents, by length, then by task."""
        out: list[tuple[str, int, int, int]] = []
        for length in sorted(self.args.lengths):
            for task in self.args.tasks:
                per = min(self.args.questions, TASKS[task].max_questions)
                for number in range(-(-self.args.answers // per)):
                    out.append(
                        (
                            task,
                            length,
                            self.args.seed * 100_000 + number,
                            min(per, self.args.answers - number * per),
                        )
                    )
        return out

    def run(self) -> None:
        """Answer everything that is missing."""
        todo = [
            d
            for d in self.documents()
            if any(
                (m, d[0], d[1], d[2], q) not in self.answers.done
                for m in self.methods
                for q in range(d[3])
            )
        ]
        work, began, finished = sum(length for _, length, _, _ in todo), time.monotonic(), 0
        for task, length, seed, questions in todo:
            for record in self.document(task, length, seed, questions):
                self.answers.add([record])
            finished += length
            spent = time.monotonic() - began
            left = spent / finished * (work - finished)
            progress(
                f"{task} {length:,} tokens: {100 * finished / work:.0f}%, {spent:.0f} s, "
                f"about {left:.0f} s left"
            )
        say("")

    def document(self, task: str, length: int, seed: int, questions: int) -> Iterator[Record]:
        """Yield the records of one document under all methods."""
        count = token_counter(self.llm.tokenizer)
        sample = make_sample(task, length, count, seed, questions)
        shared, own = split_prompts(self.llm, sample)
        limits = [self.args.max_tokens or count(text) + SPARE for text in sample.answers]
        capacity = len(shared) + max(map(len, own)) + max(limits)
        with self.llm.session(max_context=min(self.llm.max_context, capacity)) as session:
            if shared:
                session.prefill(shared)
            for name, method in self.methods.items():
                sparse = not isinstance(method, Full)
                if sparse:
                    session.set_method(method)
                for question, ids in enumerate(own):
                    tokens = answer(session, ids, limits[question], sparse)
                    session.truncate(len(shared))
                    text = answer_text(self.llm.tokenizer, tokens)
                    yield {
                        "method": name,
                        "task": task,
                        "length": length,
                        "seed": seed,
                        "question": question,
                        "depth": sample.meta["depths"][question],
                        "right": int(is_right(self.args.judge, text, sample, question)),
                        "tokens": tokens,
                        "text": text,
                        "expected": sample.answers[question],
                    }

    def about(self, seconds: float) -> dict[str, Any]:
        """Facts of the run for the report."""
        out: dict[str, Any] = {
            "model": model_label(self.args.model),
            "device": str(self.llm.device),
            "dtype": str(self.llm.dtype).removeprefix("torch."),
        }
        for name, method in self.methods.items():
            method, plan = self.llm.resolve_method(method)
            if not isinstance(method, OmniKV):
                continue
            a, b = plan.dense_share, method.share
            out[name] = (
                f"filters {method.filter_layers}, wait layers {method.wait_layers}, "
                f"selector {method.selector}, tail {method.tail}, "
                f"{len(plan.sparse_layers)} of {plan.num_layers} layers sparse, "
                f"Mem {100 * (a + b * (1 - a)):.1f}%"
            )
        return out | {"seconds": round(seconds)}


def _key(record: Record) -> tuple:
    return tuple(record[name] for name in ("method", "task", "length", "seed", "question"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run and print the report. Exit code 0, 1 (the run failed), 2 (usage) or 130 (Ctrl-C)."""
    began, args = time.monotonic(), arguments(argv)
    warnings.simplefilter("ignore", UserWarning)

    def work() -> None:
        evaluation = Evaluation(args)
        evaluation.run()
        about = evaluation.about(time.monotonic() - began)
        print(write(evaluation.answers.records, about, args.out))
        print(f"report, answers and plots: {args.out}")

    return guarded(work, f"stopped; the same command goes on from {args.out / 'answers.jsonl'}")
