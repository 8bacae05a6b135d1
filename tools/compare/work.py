"""The work of a comparison: documents in an order that is fair wherever it stops, the time they
take, the processes that do them.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.queues import Queue
from typing import Any

import torch

from engine import LLM, Full
from engine.base.errors import EngineError, UsageError
from tools.common.program import say
from tools.common.records import Record
from tools.compare.build import Facts
from tools.compare.bytes import Held, measure, measure_banks
from tools.compare.methods import REGISTRY, variants
from tools.compare.own import load
from tools.compare.run import Each, Job, Paper, Rules, run_document, runs
from tools.tasks import TASKS

Done = tuple[Any, Any, float]  # (job, records, seconds); (None, error, 0.0) where a worker failed

# tokens of a session beyond the document: two questions and answers, a template's words
ROOM = 512
# tokens beyond the document where bytes are measured: a question and a block's rounding
EDGE = 64
WARM = 4  # tokens per answer of the warm-up
WARM_NUMBER = 99_999  # a document that no run asks about


@dataclass(frozen=True)
class Order:
    """What a worker needs to build its own model and variants; plain values."""

    model: str
    device: str
    dtype: str
    threads: int | None
    names: tuple[tuple[str, str, float], ...]  # (name, kind, budget)
    lengths: tuple[int, ...]
    filters: tuple[int, ...] | None
    wait: int | None
    tail: int
    rules: Rules
    kept: tuple[int, ...] | str = ()
    banks: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()  # files with methods of one's own


def jobs(tasks: Sequence[str], lengths: Sequence[int], answers: int, questions: int) -> list[Job]:
    """Jobs in rounds: one document of every task and length, then the next of each, until every
    cell has its answers.
    """
    per = {task: min(questions, TASKS[task].max_questions) for task in tasks}
    rounds = max(-(-answers // n) for n in per.values())
    return [
        Job(task, length, number, min(per[task], answers - number * per[task]))
        for number in range(rounds)
        for length in sorted(lengths)
        for task in tasks
        if number * per[task] < answers
    ]


class Bench:
    """One process's model and, per length, the variants that run on it."""

    def __init__(self, order: Order):
        warnings.simplefilter("ignore", UserWarning)
        self.order = order
        REGISTRY.update(load(order.imports))
        self.llm = LLM(
            order.model,
            device=order.device,
            dtype=order.dtype,
            threads=order.threads,
            method=Full(),
        )
        limit = self.llm.max_context
        if max(order.lengths) + ROOM > limit:
            raise UsageError(
                f"documents of {max(order.lengths)} tokens and {ROOM} for questions and answers "
                f"do not fit the {limit} tokens this model can hold here"
            )
        self.variants = {
            length: variants(self.facts(length), order.names) for length in order.lengths
        }

    def use(self, order: Order) -> None:
        """Go on with another Order that differs in threads only."""
        self.order = order
        torch.set_num_threads(order.threads or 1)

    def facts(self, length: int) -> Facts:
        """The basis of budgets at a length: a session of the document and little more."""
        order = self.order
        own = order.filters, order.wait, order.tail, order.kept, order.banks
        return Facts(self.llm, length + EDGE, *own)

    def capacity(self, length: int) -> int:
        """Tokens of the sessions that answer."""
        return length + ROOM + 2 * (self.order.rules.max_tokens or 0)

    def run(
        self,
        job: Job,
        skip: Sequence[str] = (),
        rules: Rules | None = None,
        each: Each | None = None,
    ) -> tuple[list[Record], dict[str, float], float]:
        """`run_document` of a job under all variants of its length; each: called after one."""
        rules = rules or self.order.rules
        paper = Paper(self.llm, job, rules)
        capacity = min(self.llm.max_context, self.capacity(job.length))
        if paper.room() > capacity:
            raise UsageError(
                f"{job.task} at {job.length} tokens: two questions and answers need "
                f"{paper.room()} tokens, the session holds {capacity}; "
                "use --max-tokens or --turns 1"
            )
        steps = rules.question == "sparse"
        return run_document(self.llm, paper, self.variants[job.length], capacity, skip, each, steps)

    def bytes_held(self, length: int, task: str) -> dict[str, Held]:
        """{label: Held} at one length, each measured in a session that reads a document of
        `task`.
        """
        facts, out = self.facts(length), {}
        turns = Paper(self.llm, Job(task, length, WARM_NUMBER, 1), self.order.rules).turns
        ids = (turns.shared + turns.own[0])[: facts.capacity]
        banks = measure_banks(self.llm, self.order.banks, facts.capacity, ids)
        for variant in self.variants[length]:
            if variant.bank:
                out[variant.label] = banks[variant.bank]
            elif variant.method is not None and not variant.alias:
                out[variant.label] = measure(self.llm, variant.method, facts.capacity, ids)
        return out


# -------------------------------------------------------------------- how long it will take


class OutOfTime(Exception):
    """The minutes are over before the warm-up is."""


class Clock:
    """Seconds of documents: from a timed warm-up at first, then from finished documents.

    A document costs its readings once (the shared one and those of methods that read it by
    themselves for all its questions), then per conversation a part that does not depend on the
    answers and a part per token.
    """

    def __init__(
        self,
        bench: Bench,
        tasks: Sequence[str],
        lengths: Sequence[int] | None = None,
        stop: float | None = None,
    ):
        """Warm up at `lengths` (None: all), a line for each method; raises OutOfTime after the
        method that ends at `stop` (time.monotonic) or later.
        """
        self.stop = stop
        self.fixed: dict[int, tuple[float, float]] = {}  # per document, per conversation
        self.token: dict[int, float] = {}
        self.lengths: dict[tuple[str, int], float] = {}  # of answers
        for length in sorted(bench.order.lengths if lengths is None else lengths):
            self._warm(bench, length, tasks[0])
            for task in tasks:
                paper = Paper(bench.llm, Job(task, length, WARM_NUMBER, 1), bench.order.rules)
                self.lengths[task, length] = sum(paper.right) / len(paper.right) + 1
        self.took: dict[tuple[str, int], list[float]] = {}
        self.ratio: list[tuple[float, float]] = []  # (seconds, guess)

    def _warm(self, bench: Bench, length: int, task: str) -> None:
        rules = bench.order.rules
        per = min(rules.questions, TASKS[task].max_questions)
        warm = replace(rules, questions=per, max_tokens=WARM)
        job, run = Job(task, length, WARM_NUMBER, 1), runs(bench.variants[length])
        if not self.fixed:
            # first uses of libraries happen now, of full attention's
            bench.run(job, [v.label for v in run if v.name != "full" or v.bank], warm)
        done = 0

        def each(label: str, seconds: float) -> None:
            nonlocal done
            done += 1
            say(f"  {length:,} tokens, {done} of {len(run)}: {label} {seconds:.1f} s")
            if self.stop is not None and time.monotonic() >= self.stop:
                raise OutOfTime

        began = time.perf_counter()
        records, seconds, read = bench.run(job, (), warm, each)
        took = time.perf_counter() - began
        steps = sum(r["steps"] for r in records)
        decoding = sum(r["decode_seconds"] for r in records)
        turns = len(records) / max(1, len({r["variant"] for r in records}))
        self.fixed[length] = (
            took - sum(seconds.values()) + read,
            sum(seconds.values()) - decoding - read,
        )
        self.token[length] = decoding / max(1, steps) * len({r["variant"] for r in records}) * turns

    def guess(self, job: Job) -> float:
        """Seconds of a document by the warm-up."""
        once, fixed = self.fixed[job.length]
        return once + job.conversations * (
            fixed + self.token[job.length] * self.lengths[job.task, job.length]
        )

    def done(self, job: Job, seconds: float) -> None:
        """Note the seconds of a document."""
        self.took.setdefault((job.task, job.length), []).append(seconds / job.conversations)
        self.ratio.append((seconds, self.guess(job)))

    def expected(self, job: Job) -> float:
        """Seconds of a document: the mean of finished ones of its task and length, else the guess,
        corrected by how right it was about others.
        """
        like = self.took.get((job.task, job.length))
        if like:
            return job.conversations * sum(like) / len(like)
        factor = (
            sum(s for s, _ in self.ratio) / sum(g for _, g in self.ratio) if self.ratio else 1.0
        )
        return factor * self.guess(job)

    def left(self, todo: Iterable[Job], processes: int) -> float:
        """Seconds that these documents take on so many processes."""
        return sum(self.expected(job) for job in todo) / processes


# -------------------------------------------------------------------- processes


def _worker(order: Order, tasks: Queue, answers: Queue) -> None:
    try:
        torch.set_num_threads(order.threads or 1)
        bench = Bench(order)
        while (task := tasks.get()) is not None:
            job, skip = task
            began = time.perf_counter()
            records, _, _ = bench.run(job, skip)
            answers.put((job, records, time.perf_counter() - began))
    except KeyboardInterrupt:
        return
    except EngineError as error:
        answers.put((None, f"{error}", 0.0))
    # whatever breaks a worker ends the run, with its name
    except Exception as error:
        answers.put((None, f"{type(error).__name__}: {error}", 0.0))


class Inside:
    """Documents done in this process, one at a time."""

    processes = 1

    def __init__(self, bench: Bench):
        self.bench = bench
        self.ready: list[Done] = []

    def give(self, job: Job, skip: Sequence[str]) -> None:
        """Do it."""
        began = time.perf_counter()
        records, _, _ = self.bench.run(job, skip)
        self.ready.append((job, records, time.perf_counter() - began))

    def take(self) -> Done:
        """(job, records, seconds) of a document that is done."""
        return self.ready.pop()

    def close(self) -> None:
        """Nothing to end."""


class Outside:
    """Documents done by worker processes, each with its own model and one thread."""

    def __init__(self, order: Order, processes: int):
        context = multiprocessing.get_context("spawn")
        self.processes, self.tasks, self.answers = processes, context.Queue(), context.Queue()
        self.workers = [
            context.Process(target=_worker, args=(order, self.tasks, self.answers), daemon=True)
            for _ in range(processes)
        ]
        for worker in self.workers:
            worker.start()

    def give(self, job: Job, skip: Sequence[str]) -> None:
        """Queue a document."""
        self.tasks.put((job, skip))

    def take(self) -> Done:
        """(job, records, seconds) of the next document that is done. Raises EngineError where a
        worker failed.
        """
        while True:
            try:
                job, records, seconds = self.answers.get(timeout=1.0)
            except queue.Empty:
                dead = next((worker for worker in self.workers if worker.exitcode), None)
                if dead is not None:
                    raise EngineError(
                        f"a worker process ended before its work did (exit status {dead.exitcode}; "
                        "out of memory?): use --processes 1"
                    ) from None
                continue
            if job is None:
                raise EngineError(records)
            return job, records, seconds

    def close(self) -> None:
        """End the workers."""
        for worker in self.workers:
            if worker.is_alive():
                worker.terminate()
        for worker in self.workers:
            worker.join(5.0)
