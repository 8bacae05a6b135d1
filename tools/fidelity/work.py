"""The work of a measurement: what is done, what is left and how long it takes, in rounds that are
fair wherever it stops.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine import LLM, Full
from engine.base.errors import SettingError, UsageError
from engine.model.config.config import ModelConfig
from engine.plan.prefill_time import PrefillFlops
from tools.common.documents import Text, texts
from tools.common.program import progress, say
from tools.common.records import AnswerFile
from tools.compare.comparison import span
from tools.compare.own import digests
from tools.fidelity.columns import Column, asked, columns, filter_sets
from tools.fidelity.follow import Followed, Record, key_of
from tools.fidelity.needles import LONGEST, NeedlePaper
from weights.fingerprint import weights_digest

if TYPE_CHECKING:
    import argparse


TRIAL = 256  # tokens of the warm-up
ROOM = 256  # tokens of a needle's question, its answer and a chat template
FILE = "records.jsonl"


@dataclass(frozen=True)
class Unit:
    """One text at one length: what is read once. part: "follow" or "needle"."""

    part: str
    length: int
    text: Text


@dataclass
class Rates:
    """What reading and a step cost on this machine, from a short warm-up, corrected by what was
    measured since.
    """

    config: ModelConfig
    itemsize: int
    prefill: float  # seconds of TRIAL tokens
    step: float  # seconds of a step at TRIAL tokens
    guessed: float = 0.0
    took: float = 0.0

    @classmethod
    def measured(cls, llm: LLM) -> Rates:
        """Of a warm-up."""
        with llm.session(Full(), max_context=2 * TRIAL, offload="device") as session:
            for _ in range(2):  # first uses of libraries happen the first time
                session.truncate(0)
                began = session.stats
                session.prefill(range(TRIAL))
                for token in range(4):
                    session.decode(token)
                after = session.stats
        prefill = after.prefill_seconds - began.prefill_seconds
        step = (after.decode_seconds - began.decode_seconds) / 4
        return cls(llm.config, llm.dtype.itemsize, prefill, step)

    def reading(self, length: int) -> float:
        """Seconds, as guessed, of reading so many tokens."""
        flops = PrefillFlops.of(self.config)
        return self.prefill * sum(flops.parts(0, length)) / sum(flops.parts(0, TRIAL))

    def steps(self, length: int, count: int) -> float:
        """Seconds, as guessed, of `count` steps at so many tokens."""

        def moved(tokens: int) -> float:
            rows = self.config.kv_bytes(self.itemsize) * self.config.num_layers
            return self.config.step_parameters * self.itemsize + rows * tokens

        return count * self.step * moved(length) / moved(TRIAL)

    def saw(self, guessed: float, took: float) -> None:
        """Work guessed at so many seconds took so many."""
        self.guessed += guessed
        self.took += took

    @property
    def factor(self) -> float:
        """How much longer work takes than guessed."""
        return self.took / self.guessed if self.guessed else 1.0


@dataclass
class Study:
    """One run of a command line: its texts, columns and records."""

    args: argparse.Namespace
    llm: LLM
    skipped: dict[str, str] = field(default_factory=dict)  # label: why a column has no figure

    def __post_init__(self) -> None:
        args, llm = self.args, self.llm
        limit = min(llm.max_context, llm.config.max_positions)
        self._fits(limit)
        sets, names = filter_sets(llm, args.filters), asked(args.methods)
        self.columns = {
            length: columns(llm, length, names, sets, args.waits, args.tail)
            for length in args.lengths
        }
        for found in self.columns.values():
            self.skipped |= {c.label: c.why for c in found if c.method is None}
        self.units = list(self._units())
        self.file = AnswerFile(args.out, key_of, FILE)
        self.header = self._header()

    def _fits(self, limit: int) -> None:
        args, most = self.args, max(self.args.lengths)
        if args.positions + args.question >= min(args.lengths):
            raise UsageError(
                f"--positions: found {args.positions} and a question of {args.question}, expected "
                f"fewer than the shortest text's {min(args.lengths)} tokens"
            )
        room = max(args.answer - args.positions, ROOM if args.needles else 0, 0)
        if most + room > limit:
            raise UsageError(
                f"--lengths: found {most} tokens and {room} for answers, expected at most the "
                f"{limit} tokens that this model holds here"
            )

    def _units(self) -> Iterator[Unit]:
        """Round by round: one text at every length, then the next."""
        args, tokenizer = self.args, self.llm.tokenizer
        end = max(128, args.positions + args.question + 32)
        follow = {
            n: texts(tokenizer, args.split, n, args.texts, args.kinds, end) for n in args.lengths
        }
        needle = {
            n: texts(tokenizer, args.split, n, args.needles, ("prose",), end) for n in args.lengths
        }
        for number in range(max(args.texts, args.needles)):
            for length in args.lengths:
                for part, found in (("follow", follow), ("needle", needle)):
                    if number < len(found[length]):
                        yield Unit(part, length, found[length][number])

    # ---------------------------------------------------------------- earlier runs

    def _header(self) -> Record:
        """Write the line of settings; raises UsageError where the records there are have others."""
        args, llm = self.args, self.llm
        settings = {
            "model": Path(args.model).name,
            "weights": weights_digest(llm.folder),
            "dtype": str(llm.dtype).removeprefix("torch."),
            **{name: getattr(args, name) for name in ("positions", "answer", "tail", "questions")},
        }
        if args.question:
            settings["question"] = args.question
        if args.imports:
            settings["imports"] = digests(args.imports)
        made: dict[str, Any] = {
            "settings": settings,
            "texts": {
                f"{u.part} {u.text.name} @ {u.length}": {
                    "sha256": u.text.sha256,
                    "of": list(u.text.documents),
                }
                for u in self.units
            },
            "methods": {
                f"{c.label} @ {length}": repr(c.method)
                for length, found in self.columns.items()
                for c in found
                if c.method is not None
            },
        }
        there = None if args.fresh else self.file.load()
        return self.file.go_on(there, made, new=("question", "imports"))

    # ---------------------------------------------------------------- what is left

    def todo(self, unit: Unit) -> list[Column]:
        """The columns that have not been measured on a unit."""
        return [
            c
            for c in self.columns[unit.length]
            if c.method is not None and c.label not in self.skipped and not self._done(unit, c)
        ]

    def _done(self, unit: Unit, column: Column) -> bool:
        """Whether the record that is written last of a column on a unit is there."""
        at = column.label, unit.text.name, unit.length
        last = ("needle", *at, self.args.questions - 1)
        return (last if unit.part == "needle" else ("text", *at, None)) in self.file.done

    def cost(self, rates: Rates, unit: Unit, column: Column | None) -> float:
        """Seconds, as guessed, of a column on a unit, or of what is made once for all (None)."""
        args, length = self.args, unit.length
        once, asks = (args.positions + args.answer, 1)
        if args.question and column is not None:
            once += args.question + args.positions
        if unit.part == "needle":
            once, asks = args.questions * LONGEST // 2, args.questions
        if column is None:
            return rates.reading(length) + rates.steps(length, once)
        assert column.method is not None
        plan = self.llm.resolve_method(column.method)[1]
        needs = column.method.needs(plan, self.llm.config, length, self.llm.dtype.itemsize)
        reads = 1 if column.entry.reads == "own" else asks if needs.every_query else 0
        return reads * rates.reading(length) + rates.steps(length, once)

    def left(self, rates: Rates) -> float:
        """Seconds of all that is left, corrected by what was measured."""
        total = 0.0
        for unit in self.units:
            wanted = self.todo(unit)
            total += sum(self.cost(rates, unit, column) for column in (None, *wanted) if wanted)
        return total * rates.factor

    # ---------------------------------------------------------------- doing it

    def run(self, rates: Rates, minutes: float | None) -> None:
        """Measure what is left, or stop after so many minutes at a whole column."""
        began = time.monotonic()
        columns_left = sum(len(self.todo(unit)) for unit in self.units)
        total = columns_left
        for unit in self.units:
            for guessed, took, count in self._measured(rates, unit):
                rates.saw(guessed, took)
                columns_left -= count
                spent = time.monotonic() - began
                progress(
                    f"{total - columns_left}/{total} columns of texts, {spent:.0f} s, "
                    f"about {span(self.left(rates))} left"
                )
                if minutes is not None and spent > 60 * minutes:
                    say(f"\nstopped after {minutes:g} minutes; the same command goes on")
                    return
        say("")

    def _measured(self, rates: Rates, unit: Unit) -> Iterator[tuple[float, float, int]]:
        """(guessed seconds, measured seconds, columns) of each part of a unit as it is done."""
        wanted = self.todo(unit)
        if not wanted:
            return
        once, began = self.cost(rates, unit, None), time.perf_counter()
        if unit.part == "needle":
            paper = NeedlePaper(self.llm, unit.text, unit.length, self.args.questions)
            full = next(c for c in self.columns[unit.length] if c.name == "full")
            done = [full.label] if full not in wanted else []
            asked = [full, *(c for c in wanted if c is not full)]
            if self.args.question:
                self.file.add(paper.records(asked, done, steps=True)[0])
            self.file.add(paper.records(asked, done)[0])
            guessed = once + sum(self.cost(rates, unit, column) for column in wanted)
            yield guessed, time.perf_counter() - began, len(wanted)
            return
        args = self.args
        given = args.positions, args.answer, args.mass, args.question
        with Followed(self.llm, unit.text, *given) as followed:
            yield once, followed.seconds, 0
            for column in wanted:
                began = time.perf_counter()
                try:
                    self.file.add(followed.records(column))
                except SettingError as error:
                    self.skipped[column.label] = f"{error}"
                yield self.cost(rates, unit, column), time.perf_counter() - began, 1
