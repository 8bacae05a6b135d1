"""One run of RULER: its prompts under every method as tools.compare reads documents, its answers in
a file, and what is left where it is stopped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine import LLM, Full
from engine.base.errors import UsageError
from tools.bench import header
from tools.common.program import model_label, progress, replace_json, say
from tools.compare.build import Facts
from tools.compare.comparison import key_of, load_average, span
from tools.compare.methods import Variant, variants
from tools.compare.own import digests
from tools.compare.run import Answer, Job, run_document, runs
from tools.eval.answers import AnswerFile, Record, require_same
from tools.suites.report import markdown
from tools.suites.ruler import TASKS, make
from tools.suites.ruler.instance import split_ids
from tools.suites.ruler.tasks import differs
from weights.fingerprint import weights_digest


@dataclass(frozen=True)
class Halves:
    """Token ids of a prompt: `shared` up to the question, and what follows (tools.compare.turns has
    as much of a document with several).
    """

    shared: list[int]
    own: list[list[int]]


class Asked:
    """One prompt of RULER, with what tools.compare.run.Reader asks of a document: one question, one
    turn.
    """

    def __init__(self, llm: LLM, job: Job, seed: int, files: dict[str, Path]) -> None:
        self.llm, self.job, self.seed = llm, job, seed
        assert llm.tokenizer is not None
        self.instance = make(job.task, job.length, job.number, llm.tokenizer, seed, files)
        shared, own = split_ids(llm.tokenizer, self.instance)
        self.turns = Halves(shared, [own])

    def most(self, question: int) -> int:
        """Tokens that an answer may have."""
        return TASKS[self.job.task].written

    def second(self, first: int) -> int | None:
        """No question follows."""
        return None

    def record(self, variant: Variant, question: int, turn: int, answer: Answer) -> Record:
        """One line of answers.jsonl, as tools.compare writes them; `right` is the score."""
        assert self.llm.tokenizer is not None
        text, instance = self.llm.tokenizer.decode(answer.tokens), self.instance
        depths = instance.depths
        facts = {key: value for key, value in asdict(answer).items() if key not in ("fed",)}
        return {
            "variant": variant.label,
            "name": variant.name,
            "kind": variant.kind,
            "budget": variant.budget,
            "kept": [],
            "bank": "",
            "task": self.job.task,
            "length": self.job.length,
            "seed": self.seed * 100_000 + self.job.number,
            "question": question,
            "turn": turn,
            "depth": sum(depths) / len(depths) if depths else None,
            "right": TASKS[self.job.task].score(text, instance.answers),
            **facts,
            "prompt_tokens": instance.tokens,
            "text": text,
            "expected": instance.answers,
        }


class Suite:
    """A run: the model, its methods, the answers there are, the prompts to do."""

    def __init__(self, args: argparse.Namespace, names: Sequence[tuple[str, str, float]]) -> None:
        self.args, self.began = args, time.monotonic()
        self.files = {k: v for k in ("squad", "hotpotqa") if (v := getattr(args, k)) is not None}
        self.llm = LLM(
            args.model, device=args.device, dtype=args.dtype, threads=args.threads, method=Full()
        )
        if max(args.lengths) > self.llm.max_context:
            raise UsageError(
                f"--lengths: found {max(args.lengths)}, expected at most the "
                f"{self.llm.max_context} tokens that this model can hold here"
            )
        if self.llm.tokenizer is None:
            raise UsageError("this model has no tokenizer, and prompts are made of its tokens")
        filters = tuple(args.filters) if args.filters else None
        self.variants = {
            length: variants(Facts(self.llm, length, filters, args.wait, args.tail), names)
            for length in args.lengths
        }
        self.settings: dict[str, Any] = {
            "model": model_label(args.model),
            "weights": weights_digest(self.llm.folder),
            "dtype": args.dtype,
            "seed": args.seed,
            "filters": args.filters,
            "wait": args.wait,
            "tail": args.tail,
            "files": digests(list(map(str, self.files.values()))),
            "differs": differs(tuple(TASKS)),
        }
        self.methods = {
            f"{v.label} @ {length}": repr(v.method)
            for length, found in self.variants.items()
            for v in runs(found)
        }
        self.answers = AnswerFile(args.out, key_of)
        there = None if args.fresh else self.answers.load()
        if there is not None:
            require_same(self.answers.path, there["settings"], self.settings)
            both = {k: v for k, v in there["methods"].items() if k in self.methods}
            require_same(self.answers.path, both, {k: self.methods[k] for k in both})
            self.methods = there["methods"] | self.methods
        self.answers.start({"settings": self.settings, "methods": self.methods})
        self.took: dict[int, list[float]] = {}

    def todo(self) -> list[tuple[Job, tuple[str, ...]]]:
        """(prompt, labels that have answered it) of all with an answer missing: one of every task
        and length, then the next of each.
        """
        args, found = self.args, []
        for number in range(args.samples):
            for length in sorted(args.lengths):
                for task in args.tasks:
                    seed = args.seed * 100_000 + number
                    labels = [v.label for v in runs(self.variants[length])]
                    done = tuple(
                        label
                        for label in labels
                        if (label, task, length, seed, 0, 1) in self.answers.done
                    )
                    if len(done) < len(labels):
                        found.append((Job(task, length, number, 1), done))
        return found

    def one(self, job: Job, done: Sequence[str]) -> None:
        """Have one prompt answered by all that have not."""
        began = time.perf_counter()
        asked = Asked(self.llm, job, self.args.seed, self.files)
        capacity = min(self.llm.max_context, job.length + 1)
        records, _, _ = run_document(self.llm, asked, self.variants[job.length], capacity, done)
        self.answers.add(records)
        self.took.setdefault(job.length, []).append(time.perf_counter() - began)

    def run(self) -> None:
        """Answer in order until all is done, the minutes are over, or the estimate is known."""
        todo, limit = self.todo(), self.args.minutes
        total = len(todo)
        if self.args.estimate:  # one prompt of each length, whose answers stay
            first: dict[int, tuple[Job, tuple[str, ...]]] = {}
            for job, done in todo:
                first.setdefault(job.length, (job, done))
            for job, done in first.values():
                self.one(job, done)
            left = self.todo()
            say(f"{len(left)} prompts to do, about {span(self.expected([j for j, _ in left]))}")
            return
        for number, (job, done) in enumerate(todo):
            spent = time.monotonic() - self.began
            if limit is not None and spent + self.expected([job]) > 60 * limit:
                say(
                    f"\nstopped after {spent / 60:.1f} minutes with {total - number} of {total} "
                    "prompts to do; the same command goes on"
                )
                return
            self.one(job, done)
            left = self.expected([job for job, _ in todo[number + 1 :]])
            progress(
                f"{number + 1}/{total} prompts, {time.monotonic() - self.began:.0f} s, about "
                f"{span(left)} left"
            )
        say("")

    def expected(self, jobs: Sequence[Job]) -> float:
        """Seconds of prompts: the mean of those of their length, else by tokens."""
        every = [(length, s) for length, found in self.took.items() for s in found]
        rate = sum(s for _, s in every) / max(1, sum(length for length, _ in every))
        means = {length: sum(found) / len(found) for length, found in self.took.items()}
        return sum(means.get(job.length, rate * job.length) for job in jobs)

    def write(self) -> str:
        """Write report.md and config.json of all answers there are; returns the page."""
        config = {
            "settings": self.settings,
            "methods": self.methods,
            "device": str(self.llm.device),
            "dtype": str(self.llm.dtype).removeprefix("torch."),
            "commit": header.commit(),
            "hardware": header.hardware(self.llm.device),
            "load": load_average(),
            "flags": " ".join(header.flags_given()),
            "why": {
                f"{v.label} @ {length}": v.why
                for length, found in self.variants.items()
                for v in found
                if v.method is None
            },
        }
        tasks = [task for task in TASKS if any(r["task"] == task for r in self.answers.records)]
        page = markdown(self.answers.records, config, differs(tasks))
        replace_json(self.args.out / "config.json", config)
        (self.args.out / "report.md").write_text(page, encoding="utf-8")
        return page
