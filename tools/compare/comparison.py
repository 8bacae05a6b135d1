"""One run of a comparison: the answers there are, the documents still to do, config.json."""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import asdict
from typing import Any

from tools.bench import header as bench_header
from tools.common.program import model_label, progress, say
from tools.common.records import AnswerFile, Record
from tools.compare.bytes import Held
from tools.compare.own import digests
from tools.compare.run import Job
from tools.compare.work import Bench, Clock, Inside, Outside, jobs
from tools.tasks import TASKS
from weights.fingerprint import weights_digest


def key_of(record: Record) -> tuple:
    """Equal for two answers of the same variant to the same question in the same turn."""
    names = ("variant", "task", "length", "seed", "question", "turn")
    return tuple(record[name] for name in names)


class Comparison:
    """One run: the answers there are, the documents still to do, and its config.json."""

    def __init__(self, args: argparse.Namespace, bench: Bench, began: float):
        self.args, self.bench, self.began = args, bench, began
        self.answers = AnswerFile(args.out, key_of)
        order = bench.order
        rules = asdict(order.rules)
        if rules["question"] == "dense":  # as before there was another way
            del rules["question"]
        settings = {
            # the digest below says which training it is
            "model": model_label(args.model),
            "weights": weights_digest(bench.llm.folder),
            "dtype": args.dtype,
            **rules,
            "filters": order.filters,
            "wait": order.wait,
            "tail": order.tail,
            "controls": args.controls,
            "kept": order.kept,
        }
        if order.imports:
            settings["imports"] = digests(order.imports)
        methods = {
            f"{v.label} @ {length}": repr(v.method)
            for length, found in bench.variants.items()
            for v in found
            if v.method
        }
        there = None if args.fresh else self.answers.load()
        head = self.answers.go_on(there, {"settings": settings, "methods": methods})
        self.settings, self.methods = head["settings"], head["methods"]
        self.todo = [
            (job, skip)
            for job in jobs(args.tasks, order.lengths, args.answers, args.questions)
            if (skip := self._answered(job)) is not None
        ]

    def _answered(self, job: Job) -> tuple[str, ...] | None:
        """Labels of the variants that have answered everything about this document; None where all
        have.
        """
        seed = self.args.seed * 100_000 + job.number
        per = min(self.args.questions, TASKS[job.task].max_questions)
        wanted = [(q, 1) for q in range(job.conversations)]
        if self.args.turns > 1 and per > 1:
            wanted += [((q + 1) % per, 2) for q in range(job.conversations)]
        run = [
            v.label for v in self.bench.variants[job.length] if v.method is not None and not v.alias
        ]
        found = {
            label
            for label in run
            if all((label, job.task, job.length, seed, *w) in self.answers.done for w in wanted)
        }
        return None if len(found) == len(run) else tuple(sorted(found))

    def run(self, clock: Clock, pool: Inside | Outside) -> None:
        """Do the documents in order until there are none, or none that would end in time."""
        total = self.left = len(self.todo)
        given: list[Job] = []
        waiting = list(self.todo)
        while waiting or given:
            while waiting and len(given) < pool.processes and self._in_time(clock, waiting[0][0]):
                job, skip = waiting.pop(0)
                given.append(job)
                pool.give(job, skip)
            if not given:
                break
            job, records, seconds = pool.take()
            given.remove(job)
            self.left -= 1
            clock.done(job, seconds)
            self.answers.add(records)
            left = clock.left([*given, *(job for job, _ in waiting)], pool.processes)
            progress(
                f"{total - self.left}/{total} documents, {time.monotonic() - self.began:.0f} s, "
                f"about {span(left)} left"
            )
        say("")
        if waiting:
            say(
                f"stopped after {self.args.minutes:g} minutes with {len(waiting)} of {total} "
                "documents to do; the same command goes on"
            )

    def _in_time(self, clock: Clock, job: Job) -> bool:
        spent = time.monotonic() - self.began
        return self.args.minutes is None or spent + clock.expected(job) <= 60 * self.args.minutes

    def config(
        self, held: dict[int, dict[str, Held]], processes: int, estimated: float
    ) -> dict[str, Any]:
        """The data of config.json: every variant as it was resolved, and every run of this folder.

        held: per length and label, the bytes of a session; estimated: seconds.
        """
        llm, args, path = self.bench.llm, self.args, self.args.out / "config.json"
        before: dict[str, Any] = {"variants": {}, "runs": []}
        if path.exists() and self.answers.records:
            before = json.loads(path.read_text())
        this = {
            "commit": bench_header.commit(),
            "hardware": bench_header.hardware(llm.device),
            "load": load_average(),
            "processes": processes,
            "threads": self.bench.order.threads,
            "documents": len(self.todo),
            "estimated_seconds": estimated,
            "flags": " ".join(bench_header.flags_given()),
            "packages": {p: bench_header.version(p) for p in bench_header.PACKAGES},
        }
        # columns of earlier runs stay in the report
        variants = before["variants"]
        for length, found in self.bench.variants.items():
            for v in found:
                row = {
                    "name": v.name,
                    "kind": v.kind,
                    "budget": v.budget,
                    "control": v.entry.group == "controls",
                    "kept": list(v.kept),
                    "bank": v.bank,
                    "reads": v.entry.reads,
                    "evicts": v.entry.evicts,
                    "group": v.entry.group,
                }
                if v.method is None:
                    row["why"] = v.why
                else:
                    row |= {"method": repr(v.method), "alias": v.alias}
                    row |= {"held": held[length][v.alias or v.label].to_dict()}
                    there = variants.get(v.label, {}).get(str(length), {})
                    if there.get("method") == row["method"] and "alone" in there:
                        row["alone"] = there["alone"]  # tools/compare/alone.py
                variants.setdefault(v.label, {})[str(length)] = row
        return {
            "model": self.settings["model"],
            "settings": self.settings,
            "variants": variants,
            "device": str(llm.device),
            "dtype": str(llm.dtype).removeprefix("torch."),
            "answers": args.answers,
            "tasks": args.tasks,
            "lengths": sorted(self.bench.order.lengths),
            "runs": [*before["runs"], this],
        }


def load_average() -> float | None:
    """The system's load average of the last minute; None where there is none."""
    return round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None


def span(seconds: float) -> str:
    """A length of time for people."""
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.1f} h"
    )
