"""One run of benchmarks: their prompts under every method as tools.compare reads documents, answers
in a file as they come, and what is left where it is stopped.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine import LLM
from engine.base.errors import UsageError
from tools.bench import header
from tools.common.arguments import loaded
from tools.common.program import model_label, progress, replace_json, say
from tools.common.records import AnswerFile, Record
from tools.compare.build import Facts
from tools.compare.comparison import key_of, load_average, span
from tools.compare.methods import Variant, variants
from tools.compare.own import digests
from tools.compare.run import Answer, Job, Reader, runs
from tools.suites.pace import Missing, Pace
from tools.suites.prompts.task import Prompt, Task
from tools.suites.report import markdown
from tools.suites.ruler import TASKS
from tools.suites.ruler.tasks import differs
from weights.fingerprint import weights_digest

MARGIN = 64  # tokens of a chat template, kept free where --max-length is not given
LONG = 8  # an answer of more than 1 / LONG of what a model holds is a long one
SHORT = 2048  # tokens that every made prompt fits into: the longest at its least has some 1,100


def key(record: Record) -> tuple:
    """Equal for two answers of a method to the same question that was read in the same way."""
    return (*key_of(record), record.get("setup", "dense"))


@dataclass
class Asked:
    """One document with what tools.compare.run.Reader asks of it. setup: who reads the questions,
    "dense" full attention, "sparse" the method's own steps.
    """

    llm: LLM
    job: Job
    task: Task
    turns: Prompt
    seed: int
    setup: str = "dense"

    def most(self, question: int) -> int:
        """Tokens that an answer may have."""
        return self.task.written

    def second(self, first: int) -> int | None:
        """No question follows an answer."""
        return None

    def record(self, variant: Variant, question: int, turn: int, answer: Answer) -> Record:
        """One line of answers.jsonl, as tools.compare writes them; `right` is the score."""
        assert self.llm.tokenizer is not None
        text, prompt = self.llm.tokenizer.decode(answer.tokens), self.turns
        return {
            **self.labelled(variant, question, turn),
            "depth": prompt.depth,
            "right": prompt.scores[question](text),
            **answer.facts(),
            "prompt_tokens": len(prompt.shared) + len(prompt.own[question]),
            "cut": prompt.cut,
            "text": text,
            "expected": prompt.expected[question],
        }

    def labelled(self, variant: Variant, question: int, turn: int) -> Record:
        """What was asked of whom."""
        job, more = self.job, {"suite": self.task.suite, "setup": self.setup}
        more |= {"part": self.turns.part} if self.turns.part else {}
        return variant.asked(job.task, job.length, self.seed, question, turn) | more


def shortened(task: Task, holds: int) -> Task:
    """A task of a file whose answer takes at most half of what a model holds, in tokens."""
    if task.sizes is None or task.written <= holds // 2:
        return task
    most = holds // 2
    said = f"{task.name}: answers have {most:,} tokens at most, half of what this model holds here"
    line = f"{said} (the original: {task.written:,})"
    data = {**task.data, "tokens of an answer": f"{most}"}
    return replace(task, written=most, data=data, differs=(*task.differs, line))


class Suite:
    """A run: the model, its methods, the tasks, the answers there are, the documents to do."""

    def __init__(
        self,
        args: argparse.Namespace,
        names: Sequence[tuple[str, str, float]],
        tasks: Mapping[str, Task],
    ) -> None:
        self.args, self.names = args, names
        self.began = time.monotonic()
        self.llm = loaded(args, texts=True)
        self.tasks = {name: shortened(task, self.llm.max_context) for name, task in tasks.items()}
        self.tokenizer = self.llm.tokenizer
        self.answers = AnswerFile(args.out, key)
        there: Record = (None if args.fresh else self.answers.load()) or {}
        self.limit = self._limit(there.get("limit"))
        tasks = self.tasks
        made = any(task.sizes is None for task in tasks.values())
        brought = any(task.sizes is not None for task in tasks.values())
        self.lengths = sorted({*(args.lengths if made else ()), *([self.limit] if brought else ())})
        self.variants = {length: self.at(length) for length in self.lengths}
        self.pace = Pace(tasks)
        methods = {
            f"{v.label} @ {length}": repr(v.method)
            for length, found in self.variants.items()
            for v in runs(found)
        }
        data = {f"{t.name}: {k}": v for t in tasks.values() for k, v in t.data.items()}
        here = {"settings": self._settings(), "methods": methods, "data": data}
        self.head = self.answers.go_on(there or None, here, limit=self.limit)

    def at(self, capacity: int) -> list[Variant]:
        """The methods at their budgets for so many tokens of prompt and answer."""
        args = self.args
        filters = tuple(args.filters) if args.filters else None
        return variants(Facts(self.llm, capacity, filters, args.wait, args.tail), self.names)

    def _limit(self, before: int | None) -> int:
        """Tokens to which prompts of local files are cut: as asked for, as an earlier run of the
        folder had it, else what the model holds beside a template and the longest answer. An answer
        of more than 1 / LONG of what it holds does not count: its own prompts are cut once more.
        """
        args, holds = self.args, self.llm.max_context
        made = any(task.sizes is None for task in self.tasks.values())
        longest = max(args.lengths) if made else 1
        for name, value in (("--lengths", longest), ("--max-length", args.max_length or 1)):
            if value > holds:
                raise UsageError(
                    f"{name}: found {value}, expected at most the {holds} tokens that this model "
                    "can hold here"
                )
        tasks = self.tasks.values()
        usual = [task.written for task in tasks if task.written <= holds // LONG]
        own = max(2, holds - max(usual, default=holds // LONG) - MARGIN)
        return int(args.max_length or min(before or own, own))

    def _settings(self) -> dict[str, Any]:
        args = self.args
        files = [str(path) for name in ("squad", "hotpotqa") if (path := getattr(args, name))]
        return {
            "model": model_label(args.model),
            "weights": weights_digest(self.llm.folder),
            "dtype": args.dtype,
            "seed": args.seed,
            "filters": args.filters,
            "wait": args.wait,
            "tail": args.tail,
            "files": digests(files),
            "differs": differs(tuple(TASKS)),
        }

    def todo(self) -> list[tuple[Job, Missing]]:
        """(document, who has not answered) of all with an answer missing: the first of every task
        and length, then the next of each.
        """
        tasks, found = self.tasks.values(), []
        most = {task.name: task.documents(self.args.samples) for task in tasks}
        for number in range(max(most.values())):
            for length in self.lengths:
                for task in tasks:
                    own = length == self.limit if task.sizes else length in self.args.lengths
                    if not own or number >= most[task.name]:
                        continue
                    job = Job(task.name, length, number, task.questions(number))
                    if missing := self._missing(job):
                        found.append((job, missing))
        return found

    def _seed(self, job: Job) -> int:
        brought = self.tasks[job.task].sizes is not None
        return job.number if brought else self.args.seed * 100_000 + job.number

    def _missing(self, job: Job) -> Missing:
        done, seed, questions = self.answers.done, self._seed(job), range(job.conversations)
        found: dict[str, tuple[str, ...]] = {}
        for setup in self.args.question:
            labels = tuple(
                v.label
                for v in runs(self.variants[job.length])
                if any(
                    (v.label, job.task, job.length, seed, q, 1, setup) not in done
                    for q in questions
                )
            )
            found |= {setup: labels} if labels else {}
        return found

    def one(self, job: Job, missing: Missing) -> None:
        """Have one document's questions answered by all that have not; a method's answers are kept
        when it has given them.
        """
        began, task = time.perf_counter(), self.tasks[job.task]
        room = self.llm.max_context - task.written - 1
        prompt = task.make(self.tokenizer, job.length, job.number, room)
        whole = prompt.tokens + task.written + 1
        capacity = whole if task.sizes else min(self.llm.max_context, max(whole, job.length + 1))
        found = self.at(capacity) if task.sizes else self.variants[job.length]
        asked = Asked(self.llm, job, task, prompt, self._seed(job))
        full = next(v for v in found if v.name == "full")
        with Reader(self.llm, asked, capacity) as reader:
            for setup, labels in missing.items():
                asked.setup = setup
                reader.ask(steps=setup == "sparse")
                others = [v for v in runs(found) if v is not full and v.label in labels]
                for variant in [full, *others]:
                    records = reader.records(variant, job.conversations)
                    self.answers.add(records if variant.label in labels else [])
                self.answers.add(self._without_a_run(asked, found, labels))
        self.pace.note(job, missing, time.perf_counter() - began)

    def _without_a_run(
        self, asked: Asked, found: Sequence[Variant], labels: Sequence[str]
    ) -> Iterable[Record]:
        """Records of methods that do not answer by themselves about a document of this length: what
        is the same as another has its answers, and what has no budget here says why.
        """
        kinds = {v.label: v for v in found if v.label in labels and (v.alias or v.method is None)}
        for label, variant in kinds.items():
            for question in range(asked.job.conversations):
                own = asked.labelled(variant, question, 1)
                if variant.alias:
                    other = key({**own, "variant": variant.alias})
                    like = next(r for r in self.answers.records if key(r) == other)
                    yield {**like, **own}
                else:
                    yield {**own, "variant": label, "skipped": variant.why}

    def run(self) -> None:
        """Answer in order until all is done, the minutes are over, or the estimate is known."""
        todo, limit = self.todo(), self.args.minutes
        total = len(todo)
        self._require_room(job for job, _ in todo)
        if self.args.estimate:  # one document of each suite and length, whose answers stay
            first: dict[tuple[str, int], tuple[Job, Missing]] = {}
            for job, missing in todo:
                first.setdefault((self.tasks[job.task].suite, job.length), (job, missing))
            for job, missing in first.values():
                self.one(job, missing)
            left = self.todo()
            say(f"{len(left)} prompts to do, about {span(self.pace.expected(left))}")
            return
        for number, (job, missing) in enumerate(todo):
            spent = time.monotonic() - self.began
            if limit is not None and spent + self.pace.expected([(job, missing)]) > 60 * limit:
                say(
                    f"\nstopped after {spent / 60:.1f} minutes with {total - number} of {total} "
                    "prompts to do; the same command goes on"
                )
                return
            self.one(job, missing)
            progress(
                f"{number + 1}/{total} prompts, {time.monotonic() - self.began:.0f} s, about "
                f"{span(self.pace.expected(todo[number + 1 :]))} left"
            )
        say("")

    def _require_room(self, jobs: Iterable[Job]) -> None:
        """Raise UsageError for the first made prompt that is too long, before any is asked."""
        for job in jobs:
            task = self.tasks[job.task]
            if task.sizes is None and job.length < SHORT:
                task.make(self.tokenizer, job.length, job.number, self.llm.max_context)

    def write(self) -> str:
        """Write report.md and config.json of all answers there are; returns the page."""
        records = self.answers.records
        config = {
            **self.head,
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
        ruler = [name for name in TASKS if any(r["task"] == name for r in records)]
        lines = differs(ruler) if ruler else []
        lines += dict.fromkeys(line for task in self.tasks.values() for line in task.differs)
        page = markdown(records, config, lines)
        replace_json(self.args.out / "config.json", config)
        (self.args.out / "report.md").write_text(page, encoding="utf-8")
        return page
