"""Tokens a second of exact mode beside full attention, on random weights with planted acceptance.

Random weights accept almost nothing, so what is fed decides: after each verification the first
drafts are fed as they are, as many as a real model's acceptance says, and then another token.
Everything else runs as it does. Full attention and every setting take turns on one bank; times are
the thread's CPU time.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from engine import LLM, Exact, Full, OmniKV, SamplingParams
from engine.exact.draft_length import DraftLength
from engine.exact.runner import ExactRunner
from engine.methods.exact import CHOOSERS, DRAFT_WEIGHTS
from engine.sampling.sampler import Sampler
from engine.session.session import Session
from kernels.launch.isa import isa
from tools.bench.shapes import shape_config, shape_filters
from tools.bench.suite import sharp_stream
from tools.common.synthetic_bank import synthesize

ROOM = 512
STEPS = 3  # steps of full attention, or cycles, of one turn
GOLDEN = 0.6180339887  # steps of it: a few cycles hold every share

# shares of cycles of 1, 2, 3, 4 and 6 drafts that keep the first 1, 2, ...: greedy answers of
# SmolLM2-135M, 4,096 and 7,168 tokens, by who chose (docs/EXACT.md)
KEPT = {
    "drafter": (
        (0.95,),
        (0.96, 0.83),
        (0.95, 0.82, 0.79),
        (0.94, 0.76, 0.74, 0.70),
        (0.96, 0.77, 0.73, 0.67, 0.61, 0.54),
    ),
    "verifier": (
        (0.90,),
        (0.90, 0.78),
        (0.85, 0.74, 0.67),
        (0.84, 0.71, 0.66, 0.64),
        (0.82, 0.65, 0.55, 0.55, 0.51, 0.45),
    ),
}


def shares_of(chooser: str, drafts: int) -> Sequence[float]:
    """Shares of cycles of so many drafts that keep the first 1, 2, ...; of 5 and 7 as of 6."""
    known = {len(shares): shares for shares in KEPT[chooser]}
    if drafts == 7:
        return (*known[6], known[6][5] ** 2 / known[6][4])
    return known.get(drafts) or known[6][:drafts]


@dataclass(frozen=True)
class Setting:
    """Settings of Exact, read from text such as "verifier:2", "auto:auto" or "drafter:3:int8"."""

    chooser: str
    draft: int | str
    weights: str = "model"

    @classmethod
    def of(cls, text: str) -> Setting:
        """Raises SystemExit for other text."""
        chooser, _, rest = text.partition(":")
        draft, _, weights = rest.partition(":")
        drafts = draft if draft == "auto" or draft not in tuple("1234567") else int(draft)
        known = draft == "auto" or isinstance(drafts, int)
        if chooser not in CHOOSERS or not known or weights not in ("", *DRAFT_WEIGHTS):
            raise SystemExit(
                f"--settings: found {text!r}, expected drafter, verifier or auto, a colon, 1 to 7 "
                "or auto, and :int8 for drafts by such weights"
            )
        return cls(chooser, drafts, weights or "model")

    def __str__(self) -> str:
        return f"{self.chooser}:{self.draft}{':int8' if self.weights == 'int8' else ''}"

    def over(self, method: OmniKV) -> Exact:
        """Exact mode over a method with these settings."""
        return Exact(
            method,
            self.draft,
            lookup=False,
            chooser=self.chooser,
            draft_weights=self.weights,
        )


@dataclass
class Speed:
    """One setting at one length. full, least: thread CPU seconds of a step of full attention in the
    same run, median over turns and least; cycle: of a cycle, median over turns; drafts, tokens:
    drafted and expected to be written by a cycle; verifier: share of cycles whose verification
    chose; counted: times full attention's speed by counted bytes.
    """

    shape: str
    dtype: str
    length: int
    setting: str
    isa: str
    load: float
    turns: int
    full: float
    least: float
    cycle: float
    drafts: float
    tokens: float
    verifier: float
    counted: float

    @property
    def ratio(self) -> float:
        """Exact mode's speed over full attention's median."""
        return self.full * self.tokens / self.cycle

    def to_dict(self) -> dict[str, Any]:
        """Plain dict for JSON."""
        return asdict(self) | {"ratio": self.ratio}


class Planted:
    """Feeds a session under Exact so that drafts are accepted as `shares` says, or as KEPT does of
    whoever chooses. luck: of the first cycle, 0 to 1.
    """

    def __init__(self, session: Session, shares: Sequence[float] = (), luck: float = 0.5):
        self.session, self.shares, self.luck = session, shares, luck
        runner = session.runner
        assert isinstance(runner, ExactRunner)
        self.runner, self.token = runner, 1
        self.drafted, self.expected, self.verifier = 0, 0.0, 0
        params = SamplingParams(max_tokens=1 << 30)
        session.write_with(Sampler(params, session.loaded.config.vocab_size))

    def cycle(self) -> int:
        """Run one cycle; tokens written."""
        chosen = self.runner._serves(len(self.session) + 1)
        self.session.decode(self.token)
        running, written = self.runner._cycle, 1
        drafts = running.drafts if running is not None else []
        shares = self.shares[: len(drafts)]
        shares = shares or shares_of("verifier" if chosen else "drafter", len(drafts))
        self.luck = (self.luck + GOLDEN) % 1.0
        right = sum(self.luck < share for share in shares)
        for token in drafts[:right]:
            self.session.decode(token)
            written += 1
        wrong = drafts[right] if right < len(drafts) else 0
        self.token = (wrong + 1) % self.session.loaded.config.vocab_size
        self.drafted += len(drafts)
        self.expected += 1 + sum(shares)
        self.verifier += chosen
        return written


@dataclass
class _Seen:
    """What the turns of one setting saw: seconds of a cycle, and sums over all cycles."""

    seconds: list[float] = field(default_factory=list)
    cycles: int = 0
    drafted: int = 0
    expected: float = 0.0
    verifier: int = 0
    counted: float = 0.0
    # what "auto" has learnt and chosen outlives a change of settings
    length: DraftLength | None = None
    chooser: tuple[int, bool | None] = -1, None

    def turn(self, session: Session, method: Exact, shares: Sequence[float], turn: int) -> None:
        """Run a cycle that begins, and STEPS that are timed."""
        session.set_method(method)
        runner = session.runner
        assert isinstance(runner, ExactRunner)
        runner._by_drafter = self.length = self.length or runner._by_drafter
        runner._by_verifier = self.chooser
        planted = Planted(session, shares, (0.5 + 7 * turn * GOLDEN) % 1)
        planted.cycle()
        planted.drafted = planted.verifier = 0
        planted.expected, counters = 0.0, session.counters
        before = counters.cost_full, counters.cost_exact
        began = time.thread_time()
        for _ in range(STEPS):
            planted.cycle()
        self.seconds.append((time.thread_time() - began) / STEPS)
        self.chooser = runner._by_verifier
        self.cycles += STEPS
        self.drafted += planted.drafted
        self.expected += planted.expected
        self.verifier += planted.verifier
        full, exact = counters.cost_full - before[0], counters.cost_exact - before[1]
        self.counted += full / exact


def plain(session: Session) -> list[float]:
    """Seconds of STEPS steps of full attention, by a session in exact mode that drafts nothing."""
    session.write_with(None)  # without a sampler a fed token is full attention's step
    session.decode(1)
    found = []
    for _ in range(STEPS):
        began = time.thread_time()
        session.decode(1)
        found.append(time.thread_time() - began)
    return found


def compare(
    shape: str,
    dtype: str,
    length: int,
    settings: Sequence[Setting],
    shares: Sequence[float] = (),
    tokens: int = 2048,
    turns: int = 3,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[Speed]:
    """Measure settings at one length, turn by turn on one bank (full attention, then each of them).

    shares: of cycles whose first 1, 2, ... drafts are accepted, whoever chooses; (): as KEPT.
    around: what a turn runs in.
    """
    llm = LLM.from_stream(
        shape_config(shape),
        sharp_stream,
        name=shape,
        device="cpu",
        dtype=dtype,
        threads=1,
        max_context=length + ROOM,
        method=Full(),
    )
    inner = OmniKV(filter_layers=shape_filters(shape), tokens=tokens, dense_below=0)
    methods = [setting.over(inner) for setting in settings]
    full: list[float] = []
    seen = [_Seen() for _ in settings]
    with llm.session(Full()) as session:
        synthesize(session, length)
        session.decode(1)
        for method in methods:  # a copy of the weights is made here, not in a turn
            session.set_method(method)
        for turn in range(turns):
            with around():
                session.set_method(methods[0])
                full += plain(session)
                for one, method in zip(seen, methods):
                    one.turn(session, method, shares, turn)
                load = os.getloadavg()[0]
    return [
        Speed(
            shape,
            dtype,
            length,
            str(setting),
            isa(),
            round(load, 2),
            turns,
            statistics.median(full),
            min(full),
            statistics.median(one.seconds),
            one.drafted / one.cycles,
            one.expected / one.cycles,
            one.verifier / one.cycles,
            one.counted / turns,
        )
        for setting, one in zip(settings, seen)
    ]
