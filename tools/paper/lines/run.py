"""Run a line over texts: records of a text at a time, so that a run that was stopped goes on."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from engine import LLM, Full
from engine.base.errors import UsageError
from tools.common.arguments import loaded as load
from tools.common.program import model_label, progress, say
from tools.common.records import AnswerFile, Record
from tools.compare.comparison import span
from tools.paper.lines import choices, heavy, needles
from tools.paper.programs import lengths_of, limit_of
from tools.paper.table import Table
from weights.fingerprint import weights_digest

# (model, number of the text, tokens) -> records {method, column, value}
Measure = Callable[[LLM, int, int], list[Record]]
LINES: dict[str, Measure] = {
    "heavy": heavy.measure,
    "similar": choices.similar,
    "by_task": choices.by_task,
    "depths": choices.depths,
    "hits": choices.hits,
    "needles": needles.measure,
}


def key_of(record: Record) -> tuple:
    """Equal for two figures of one text."""
    return tuple(record[name] for name in ("text", "length", "method", "column"))


def loaded(args: argparse.Namespace, line: str) -> LLM:
    """The model. Needles over the host are planned for the host, where full attention's plan would
    bound the context by what the device holds.
    """
    method = needles.planned(args.filters) if line == "needles" else Full()
    return load(args, texts=True, method=method)


def run_line(
    args: argparse.Namespace, table: Table, measure: Measure, folder: Path
) -> list[Record]:
    """All records of a line: those there are, and those of texts that are missing."""
    llm = loaded(args, table.line)
    file = AnswerFile(folder, key_of, "records.jsonl")
    settings = {
        "line": table.line,
        "model": model_label(args.model),
        "weights": weights_digest(llm.folder),
        "dtype": args.dtype,
        "filters": args.filters,
    }
    file.go_on(None if args.fresh else file.load(), {"settings": settings})
    lengths = lengths_of(args, table)
    if max(lengths) > llm.max_context:
        raise UsageError(
            f"--length: found {max(lengths)}, expected at most the {llm.max_context} tokens that "
            "this model can hold here"
        )
    wanted = [(n, length) for n in range(limit_of(args, table)) for length in lengths]
    todo = [unit for unit in wanted if not _done(file, *unit)]
    began, stop = time.monotonic(), None if args.minutes is None else 60 * args.minutes
    took: dict[int, list[float]] = {}
    for at, (number, length) in enumerate(todo):
        start = time.monotonic()
        found = measure(llm, number, length)
        tag = f" at {length:,}" if len(lengths) > 1 else ""
        same = {"text": number, "length": length, "of": len(found)}
        file.add([r | same | {"column": r["column"] + tag * (r["column"] != "all")} for r in found])
        took.setdefault(length, []).append(time.monotonic() - start)
        left = _left(took, [length for _, length in todo[at + 1 :]])
        spent = time.monotonic() - began
        if args.estimate and (len(took) == len(lengths) or not todo[at + 1 :]):
            say(f"{table.name}: {len(todo) - at - 1} texts to do, about {span(left)}")
            break
        progress(
            f"{table.name}: {at + 1}/{len(todo)} texts, {spent:.0f} s, about {span(left)} left"
        )
        if stop is not None and spent > stop:
            say(f"\nstopped after {args.minutes:g} minutes; the same command goes on")
            break
    say("")
    return [r for r in file.records if (r["text"], r["length"]) in wanted]


def _done(file: AnswerFile, number: int, length: int) -> bool:
    """Whether all records of a text are there; what a killed run left half is made again."""
    own = [r for r in file.records if (r["text"], r["length"]) == (number, length)]
    return bool(own) and len(own) == own[0]["of"]


def _left(took: dict[int, list[float]], lengths: list[int]) -> float:
    """Seconds of texts of these lengths: the mean of those of their length, else by tokens."""
    every = [(length, s) for length, found in took.items() for s in found]
    rate = sum(s for _, s in every) / max(1, sum(length for length, _ in every))
    means = {length: sum(found) / len(found) for length, found in took.items()}
    return sum(means.get(length, rate * length) for length in lengths)
