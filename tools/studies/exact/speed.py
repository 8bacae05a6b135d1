"""Tokens a second of exact mode beside full attention and its drafting method, on random weights
with planted acceptance.

Random weights accept almost nothing, so what is fed decides: after each verification the first
drafts are fed as they are, as many as a real model's acceptance says, and then another token.
Everything else runs as it does. A and B take turns; times are the thread's CPU time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from engine import LLM, Exact, Full, OmniKV, SamplingParams
from engine.exact.runner import ExactRunner
from engine.sampling.sampler import Sampler
from engine.session.session import Session
from tools.bench.shapes import shape_config, shape_filters
from tools.bench.suite import sharp_stream
from tools.common.synthetic_bank import synthesize

ROOM = 512


@dataclass
class Speed:
    """One shape at one length. seconds: thread CPU time a token, median over turns: full attention,
    exact mode and the drafting method alone; accepted, drafted: by exact mode.
    """

    shape: str
    dtype: str
    length: int
    full: float
    exact: float
    drafter: float
    cycles: int
    drafted: int
    accepted: int
    counted: float

    @property
    def ratio(self) -> float:
        """Exact mode's speed over full attention's."""
        return self.full / self.exact

    def to_dict(self) -> dict[str, Any]:
        """Plain dict for JSON."""
        return asdict(self) | {"ratio": self.ratio}


class Planted:
    """Feeds a session under Exact so that drafts are accepted as `survival` says.

    survival[i]: share of cycles whose first i + 1 drafts are accepted.
    """

    def __init__(self, session: Session, survival: Sequence[float]):
        self.session, self.survival, self.luck = session, survival, 0.5
        runner = session.runner
        assert isinstance(runner, ExactRunner)
        self.runner, self.token = runner, 1
        params = SamplingParams(max_tokens=1 << 30)
        session.write_with(Sampler(params, session.loaded.config.vocab_size))

    def cycle(self) -> int:
        """Run one cycle; tokens written."""
        self.session.decode(self.token)
        running, written = self.runner._cycle, 1
        drafts = running.drafts if running is not None else []
        # steps of the golden ratio: a few cycles hold every share
        self.luck = (self.luck + 0.6180339887) % 1.0
        right = sum(self.luck < share for share in self.survival[: len(drafts)])
        for token in drafts[:right]:
            self.session.decode(token)
            written += 1
        wrong = drafts[right] if right < len(drafts) else 0
        self.token = (wrong + 1) % self.session.loaded.config.vocab_size
        return written


def timed(run: Any, least: int) -> float:
    """Thread CPU seconds a token of at least `least` tokens; run() returns tokens written."""
    began, written = time.thread_time(), 0
    while written < least:
        written += run()
    return (time.thread_time() - began) / written


def compare(
    shape: str,
    dtype: str,
    length: int,
    survival: Sequence[float],
    tokens: int = 2048,
    draft: int | str = "auto",
    turns: int = 3,
    least: int = 8,
    drafter: bool = True,
) -> Speed:
    """Measure one shape at one length, turn by turn on one bank that changes its method (A B A B).

    A change of method lays the drafter's bank out anew, so it is measured last.
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
    method = OmniKV(filter_layers=shape_filters(shape), tokens=tokens, dense_below=0)
    full, exact = [], []
    with llm.session(Full()) as session:
        synthesize(session, length)
        session.decode(1)
        session.set_method(Exact(method, draft=draft, lookup=False))
        planted = Planted(session, survival)
        for _ in range(2):
            planted.cycle()
        counters = session.counters
        before = counters.cycles, counters.drafted, counters.accepted
        sampler = session.sampler
        for _ in range(turns):
            # a fed token is full attention's step where no sampler can be guessed
            session.write_with(None)
            full.append(timed(lambda: session.decode(1) is not None, max(2, least // 3)))
            session.write_with(sampler)
            exact.append(timed(planted.cycle, least))
        plain = sum(max(2, least // 3) for _ in range(turns))
        after = counters.cycles - plain, counters.drafted, counters.accepted
        alone = 0.0
        if drafter:
            session.write_with(None)
            session.set_method(method)
            session.decode(1)
            alone = timed(lambda: session.decode(1) is not None, least)
        cycles, drafted, accepted = (b - a for a, b in zip(before, after))
        return Speed(
            shape,
            dtype,
            length,
            statistics.median(full),
            statistics.median(exact),
            alone,
            cycles,
            drafted,
            accepted,
            session.counters.speedup,
        )
