"""Scores any method on any model folder over the tasks of tools/tasks: `python -m tools.eval` (the
shipped model, full and OmniKV).

Every document is read once; each method then answers each question on it from that same bank.
Answers go to answers.jsonl one by one, so the same command goes on where it was stopped. Sparse
methods run with dense_below=0 and it is asserted that their steps were sparse.
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path

from engine import LLM, EngineError, Full, OmniKV
from tools.eval.report import write
from tools.tasks import MAIN, TASKS, make_sample
from weights.errors import UsageError
from weights.fingerprint import weights_digest

POCKET = Path(__file__).resolve().parents[2] / "weights" / "pocket"
SPARE = 8  # tokens an answer may be longer than the right one before it is cut


def arguments(argv=None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.eval", description=__doc__.splitlines()[0]
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
        "--wait", type=int, help="OmniKV wait layers (default: those the model comes with, else 1)"
    )
    parser.add_argument("--selector", default="last", choices=("last", "uniform", "exponential"))
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
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=Path("eval-out"))
    parser.add_argument(
        "--fresh",
        action="store_true",
        help="start over instead of going on with the answers in --out",
    )
    return parser.parse_args(argv)


def methods(args: argparse.Namespace) -> dict:
    """{name: method}: full attention first, then OmniKV at every share."""
    filters = tuple(args.filters) if args.filters else None
    found = {"full": Full()}
    for share in args.shares:
        found[f"omnikv {100 * share:g}%"] = OmniKV(
            filter_layers=filters,
            share=share,
            wait_layers=args.wait,
            selector=args.selector,
            dense_below=0,
        )
    return found


def prompts(llm: LLM, sample) -> tuple[list[int], list[list[int]]]:
    """(ids that all questions share, per question the ids that follow), through the model's own
    chat template.
    """
    whole = []
    for question in sample.questions:
        text = llm.tokenizer.render(
            [{"role": "user", "content": sample.document.rstrip() + "\n\n" + question}]
        )
        whole.append(llm.tokenizer.encode(text, special=False))
    shared = 0
    least = min(map(len, whole)) - 1  # every question keeps at least one token of its own
    while shared < least and all(ids[shared] == whole[0][shared] for ids in whole):
        shared += 1
    return whole[0][:shared], [ids[shared:] for ids in whole]


def answer(session, ids: list[int], most: int, sparse: bool) -> list[int]:
    """Greedy tokens of one answer, the end token left out. Asserts that sparse steps were sparse."""
    before = session.stats
    logits, out = session.prefill(ids), []
    while len(out) < most:
        token = int(logits.argmax())
        if token in session.llm.end_token_ids:
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
    """One run: the answers that exist, the ones still to do."""

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
                f"documents of {max(args.lengths)} tokens and 256 for question and answer do not fit the {limit} tokens "
                f"this model can hold here"
            )
        self.methods = methods(args)
        self.count = lambda text: len(self.llm.tokenizer.encode(text, special=False))
        keys = (
            "model",
            "questions",
            "filters",
            "wait",
            "selector",
            "judge",
            "max_tokens",
            "seed",
            "dtype",
        )
        self.settings = {key: getattr(args, key) for key in keys} | {
            "weights": weights_digest(self.llm.folder)
        }
        self.path = args.out / "answers.jsonl"
        self.records, self.done = [], set()
        args.out.mkdir(parents=True, exist_ok=True)
        self._resume()

    def _resume(self) -> None:
        if self.path.exists() and not self.args.fresh:
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    record = json.loads(line)
                except ValueError:  # the last line of a run that was killed
                    continue
                if "settings" in record:
                    if record["settings"] != self.settings:
                        raise UsageError(
                            f"{self.path} holds answers of other settings ({record['settings']}): "
                            "use --fresh or another --out"
                        )
                else:
                    self.records.append(record)
                    self.done.add(self._key(record))
        lines = [json.dumps({"settings": self.settings})] + [json.dumps(r) for r in self.records]
        part = self.path.with_suffix(".part")
        part.write_text("\n".join(lines) + "\n", encoding="utf-8")
        part.replace(self.path)

    def _key(self, r: dict) -> tuple:
        return r["method"], r["task"], r["length"], r["seed"], r["question"]

    def documents(self) -> list[tuple[str, int, int, int]]:
        """(task, length, seed, questions), all lengths of one document number before the next, so
        that every prefix of a run is fair.
        """
        out = []
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
                (m, d[0], d[1], d[2], q) not in self.done for m in self.methods for q in range(d[3])
            )
        ]
        work, began, finished = sum(length for _, length, _, _ in todo), time.monotonic(), 0
        with open(self.path, "a", encoding="utf-8") as file:
            for task, length, seed, questions in todo:
                for record in self.document(task, length, seed, questions):
                    file.write(json.dumps(record) + "\n")
                    file.flush()
                    self.records.append(record)
                finished += length
                spent = time.monotonic() - began
                left = spent / finished * (work - finished)
                print(
                    f"\r{task} {length:,} tokens: {100 * finished / work:.0f}%, {spent:.0f} s, about {left:.0f} s left   ",
                    end="",
                    file=sys.stderr,
                    flush=True,
                )
        print(file=sys.stderr)

    def document(self, task: str, length: int, seed: int, questions: int):
        """Records of one document under all methods."""
        sample = make_sample(task, length, self.count, seed, questions)
        shared, own = prompts(self.llm, sample)
        right = [self.llm.tokenizer.encode(text, special=False) for text in sample.answers]
        room = max(map(len, own)) + max(map(len, right)) + SPARE + (self.args.max_tokens or 0)
        with self.llm.session(max_context=min(self.llm.max_context, len(shared) + room)) as session:
            if shared:
                session.prefill(shared)
            for name, method in self.methods.items():
                if not isinstance(method, Full):
                    session.set_method(method)
                for index, ids in enumerate(own):
                    tokens = answer(
                        session,
                        ids,
                        self.args.max_tokens or len(right[index]) + SPARE,
                        not isinstance(method, Full),
                    )
                    session.truncate(len(shared))
                    text = self.llm.tokenizer.decode(tokens)
                    good = (
                        text.strip() == sample.answers[index]
                        if self.args.judge == "exact"
                        else sample.meta["exact"][index] in text
                    )
                    record = {
                        "method": name,
                        "task": task,
                        "length": length,
                        "seed": seed,
                        "question": index,
                        "depth": sample.meta["depths"][index],
                        "right": int(good),
                        "tokens": tokens,
                        "text": text,
                        "expected": sample.answers[index],
                    }
                    if self._key(record) not in self.done:
                        yield record

    def about(self, seconds: float) -> dict:
        """What the report says of the run."""
        out = {
            "model": self.args.model if self.args.model != str(POCKET) else "weights/pocket",
            "device": str(self.llm.device),
            "dtype": str(self.llm.dtype).removeprefix("torch."),
        }
        for name, method in self.methods.items():
            if isinstance(method, Full):
                continue
            method, plan = self.llm.resolve_method(method)
            a, b = plan.dense_share, method.share
            out[name] = (
                f"filters {method.filter_layers}, wait layers {method.wait_layers}, selector {method.selector}, "
                f"tail {method.tail}, {len(plan.sparse_layers)} of {plan.num_layers} layers sparse, "
                f"Mem {100 * (a + b * (1 - a)):.1f}%"
            )
        return out | {"seconds": round(seconds)}


def main(argv=None) -> int:
    """Run, print the report, return the exit code."""
    began, args = time.monotonic(), arguments(argv)
    warnings.simplefilter("ignore", UserWarning)
    try:
        evaluation = Evaluation(args)
        evaluation.run()
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(
            f"\nstopped; the same command goes on from {args.out / 'answers.jsonl'}",
            file=sys.stderr,
        )
        return 130
    print(write(evaluation.records, evaluation.about(time.monotonic() - began), args.out))
    print(f"report, answers and plots: {args.out}")
    return 0
