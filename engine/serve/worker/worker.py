"""The server's worker: what an answer over HTTP has beside one of engine/batch/worker.py. Several
choices, evidence, a time limit, counters, blocks kept in the cache, and clients slow to read.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from engine.base.errors import EngineError
from engine.batch.chunking import WAIT_FOR_TURN
from engine.batch.scheduler import Work
from engine.batch.worker import Ended, Job, Reading, Turn, Worker
from engine.llm import LLM
from engine.saved.cache import BlockCache
from engine.serve.worker.evidence import Evidence, Read
from engine.serve.worker.metrics import Metrics
from engine.session.generate import written
from engine.session.results import DecodeRequest, GenerationStats
from engine.session.session import Session

LOOK = 0.1  # seconds between two looks at answers that are paused, where nothing else runs
YIELD = 5.0  # seconds that an answer may be paused while others wait for its slot


@dataclass(frozen=True)
class Wrote:
    """One step of one choice; finish is set in its last, evidence and reads (Evidence.add) where
    the job asks for them.
    """

    choice: int
    text: str
    token_id: int | None
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    finish: str | None
    evidence: dict[str, Any] | None = None
    reads: Sequence[Read] = ()


Event = Reading | Wrote | Ended


@dataclass(eq=False)
class HttpJob(Job):
    """One request over HTTP; its events are Reading, Wrote and Ended."""

    choices: int = 1
    evidence: Evidence | None = None


class HttpWorker(Worker[HttpJob]):
    """timeout: seconds after which an answer is cut. pause: seconds that answers wait for a chunk
    of another's prompt (Batch).
    """

    def __init__(
        self,
        llm: LLM,
        slots: int = 4,
        waiting: int | None = 32,
        timeout: float = 3600.0,
        cache: BlockCache | None = None,
        pause: float | None = None,
    ) -> None:
        super().__init__(llm.batch(slots, pause), waiting, cache)
        self.timeout, self.metrics = timeout, Metrics()
        self._paused: list[Turn[HttpJob]] = []  # their clients do not read

    @property
    def running(self) -> int:
        """Answers under way, those that are paused among them."""
        return len(self.turns) + self.paused

    @property
    def paused(self) -> int:
        """Answers whose clients are behind with reading."""
        return len(self._paused)

    # ---------------------------------------------------------------- between rounds

    def tend(self) -> None:
        """Cut answers whose time is over, pause those whose client is behind with reading, and go
        on with those whose client has caught up, has gone, or blocks a slot that others wait for.
        """
        now, tasks = time.monotonic(), self.batch.scheduler.tasks
        for turn in [*self.turns, *self._paused]:
            if now > self._deadline or now - turn.job.since > self.timeout:
                turn.job.cut = True
        for turn in self.turns:
            job = turn.job
            if isinstance(turn.wants, DecodeRequest) and not job.over() and job.full():
                tasks.remove(turn)
                turn.since = now
                self._paused.append(turn)
        blocked = bool(self._waiting) and not self.slots.free
        for turn in list(self._paused):
            job = turn.job
            if blocked and now - turn.since > YIELD:
                job.cut, blocked = True, False  # one at a time
            if job.over() or not job.full():
                self._paused.remove(turn)
                tasks.append(turn)

    def patience(self) -> float | None:
        """LOOK while answers are paused."""
        return LOOK if self._paused else None

    def advance(self) -> None:
        """One round, with its decode step's seconds counted."""
        now = time.monotonic()
        read, wrote = self.metrics.read_seconds, self.metrics.written_tokens
        super().advance()
        if self.metrics.written_tokens > wrote:
            seconds = time.monotonic() - now - (self.metrics.read_seconds - read)
            self.metrics.decode_seconds += max(0.0, seconds)

    def began(self, job: HttpJob, cached: int) -> None:
        """Count it."""
        self.metrics.began(len(job.ids), cached)

    def was_read(self, tokens: int, seconds: float) -> None:
        """Count it."""
        self.metrics.read(tokens, seconds)

    def failed(self, job: HttpJob, error: Exception) -> None:
        """Tell the log of errors that are no client's."""
        if not isinstance(error, EngineError):
            traceback.print_exception(error)
        super().failed(job, error)

    # ---------------------------------------------------------------- one answer

    def work(self, job: HttpJob, session: Session, cached: int) -> Work:
        """Read the prompt chunk by chunk, write the choices one after the other, keep what was
        read.
        """
        if not (yield from self.read(job, session, cached)):
            return
        for choice in range(job.choices):
            if choice:
                session.truncate(len(job.ids))
            yield from self._write(job, session, choice)
        if self.cache is not None and not job.gone:
            for _ in self.cache.storing(session):
                yield WAIT_FOR_TURN

    def _write(self, job: HttpJob, session: Session, choice: int) -> Work:
        params = job.params
        if params.seed is not None:
            # choices differ, and each is the same again
            params = replace(params, seed=(params.seed + choice) % 2**63)
        if session.last_logits is None:
            session.refresh_logits()
        stats, begun = GenerationStats(cached_tokens=len(session)), False
        if job.evidence is not None:
            job.evidence.begin(session)
        with closing(written(session, params, stats, job.over)) as answer:
            for part in answer:
                if isinstance(part, DecodeRequest):
                    yield part
                    continue
                if not (choice or begun):
                    self.metrics.first(time.monotonic() - job.since)
                begun = True
                self.metrics.wrote(part.token_id is not None)
                top, evidence = tuple(part.top_logprobs), None
                reads: Sequence[Read] = ()
                if job.evidence is not None:
                    reads = job.evidence.add(session)
                    if part.finish_reason is not None:
                        yield WAIT_FOR_TURN  # comparing takes steps of its own
                        evidence = job.evidence.end(session, stats, job.over)
                job.post(
                    Wrote(
                        choice,
                        part.text,
                        part.token_id,
                        part.logprob,
                        top,
                        part.finish_reason,
                        evidence,
                        reads,
                    )
                )
