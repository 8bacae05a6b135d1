"""The one thread that owns the model. Several sessions answer at once (engine/batch/batch.py): all
that write take one step together, and between two steps one of the others reads a chunk of its
prompt or keeps a block in the cache, so that nobody's tokens stop for longer than that.
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from engine.base.errors import EngineError
from engine.batch.chunking import WAIT_FOR_TURN
from engine.batch.scheduler import Task, Work
from engine.llm import LLM
from engine.methods.base import Method
from engine.plan.prefill_time import Eta, PrefillFlops
from engine.sampling.params import SamplingParams
from engine.saved.cache import BlockCache
from engine.serve.errors import ApiError
from engine.serve.worker.evidence import Evidence, Read
from engine.serve.worker.metrics import Metrics
from engine.serve.worker.slots import Slot, Slots
from engine.session.generate import written
from engine.session.results import DecodeRequest, GenerationStats
from engine.session.session import Session

LOOK = 0.1  # seconds between two looks at answers that are paused, where nothing else runs
YIELD = 5.0  # seconds that an answer may be paused while others wait for its slot


@dataclass(frozen=True)
class Reading:
    """Progress of a prompt, in tokens; cached: held before. left: seconds; None: not known yet."""

    done: int
    total: int
    cached: int
    left: float | None = None


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


@dataclass(frozen=True)
class Ended:
    """The last event of a job; error: what cut it."""

    error: Exception | None = None


Event = Reading | Wrote | Ended


@dataclass(eq=False)
class Job:
    """One request. post is called in the worker's thread with each event; the last is Ended.

    method: what the answer is read and written with; None: as the session is.
    full: whether the client is behind with reading, so that the answer should pause.
    owner: whose key asked.
    gone: the client has left. cut: the server ends and the answer with it.
    """

    ids: list[int]
    params: SamplingParams
    choices: int
    post: Callable[[Event], None]
    evidence: Evidence | None = None
    method: Method | None = None
    full: Callable[[], bool] = bool
    owner: bytes = b""
    gone: bool = False
    cut: bool = False
    since: float = field(default_factory=time.monotonic)

    def leave(self) -> None:
        """Note that the client has left, from any thread."""
        self.gone = True


@dataclass(eq=False)
class _Turn(Task):
    """An answer under way, of a job in a slot."""

    job: Job = field(kw_only=True)
    slot: Slot = field(kw_only=True)
    since: float = 0.0  # when it was paused


class Worker:
    """Serves jobs from a bounded queue on one thread, which `start` begins and `stop` ends.

    slots: sessions held at once. waiting: most jobs that wait for one. timeout: seconds after which
    an answer is cut. pause: seconds that answers wait for a chunk of another's prompt (Batch).
    Raises ApiError from `submit` where the queue is full or the server ends.
    """

    def __init__(
        self,
        llm: LLM,
        slots: int = 4,
        waiting: int = 32,
        timeout: float = 3600.0,
        cache: BlockCache | None = None,
        pause: float | None = None,
    ) -> None:
        self.llm, self.most_waiting, self.timeout = llm, waiting, timeout
        self.batch, self.cache, self.metrics = llm.batch(slots, pause), cache, Metrics()
        self.slots = Slots(self.batch, cache)
        self._waiting: deque[Job] = deque()
        self._paused: list[_Turn] = []  # their clients do not read
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._ending = False
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job."""
        with self._changed:
            if self._ending:
                raise ApiError(503, "the server is ending", code="shutting_down")
            if len(self._waiting) >= self.most_waiting:
                # the model's thread takes from the left meanwhile
                for left in [job for job in list(self._waiting) if job.gone]:
                    with contextlib.suppress(ValueError):
                        self._waiting.remove(left)
            if len(self._waiting) >= self.most_waiting:
                raise ApiError(
                    429,
                    f"{len(self._waiting)} requests are waiting already; try again later",
                    code="queue_full",
                    headers={"Retry-After": "5"},
                )
            self._waiting.append(job)
            self._changed.notify()

    def between(self, call: Callable[[], None]) -> None:
        """Run a short call on this thread, between two rounds. It must not raise."""
        with self._changed:
            if self._ending:
                raise ApiError(503, "the server is ending", code="shutting_down")
            self._calls.append(call)
            self._changed.notify()

    def stop(self, grace: float) -> None:
        """Refuse what waits, give answers `grace` seconds to finish, then cut them; returns when
        all sessions are closed.
        """
        with self._changed:
            self._ending = True
            self._deadline = min(self._deadline, time.monotonic() + grace)
            self._changed.notify()
        self._thread.join()

    @property
    def waiting(self) -> int:
        """Jobs that wait for a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Answers under way, those that are paused among them."""
        return len(self.turns) + self.paused

    @property
    def paused(self) -> int:
        """Answers whose clients are behind with reading."""
        return len(self._paused)

    @property
    def turns(self) -> list[_Turn]:
        """Answers under way, in the order in which they read."""
        return cast("list[_Turn]", self.batch.scheduler.tasks)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while True:
            while self._calls:
                self._calls.popleft()()
            self._admit()
            self._tend()
            if self.turns:
                self._round()
                continue
            with self._changed:
                if self._paused:
                    if not self._calls:
                        self._changed.wait(LOOK)
                    continue
                if self._ending and not self._waiting and not self._calls:
                    break
                if not self._waiting and not self._calls:
                    self._changed.wait()
        self.slots.close()

    def _admit(self) -> None:
        """Begin waiting jobs as long as there are slots."""
        while self._waiting and (self.slots.free or self._ending):
            job = self._waiting.popleft()
            if self._ending:
                job.post(Ended(ApiError(503, "the server is ending", code="shutting_down")))
                continue
            if job.gone:
                job.post(Ended())
                continue
            try:
                slot, cached = self.slots.take(job.ids, job.method)
                slot.owner = job.owner
            except Exception as error:
                self._failed(job, error)
                continue
            self.metrics.began(len(job.ids), cached)
            job.post(Reading(cached, len(job.ids), cached))
            work = self._work(job, slot.session, cached)
            self.batch.scheduler.tasks.append(_Turn(slot.session, work, job=job, slot=slot))

    def _tend(self) -> None:
        """Cut answers whose time is over, pause those whose client is behind with reading, and go
        on with those whose client has caught up, has gone, or blocks a slot that others wait for.
        """
        now, tasks = time.monotonic(), self.batch.scheduler.tasks
        for turn in [*self.turns, *self._paused]:
            if now > self._deadline or now - turn.job.since > self.timeout:
                turn.job.cut = True
        for turn in self.turns:
            job = turn.job
            if isinstance(turn.wants, DecodeRequest) and not (job.gone or job.cut) and job.full():
                tasks.remove(turn)
                turn.since = now
                self._paused.append(turn)
        blocked = bool(self._waiting) and not self.slots.free
        for turn in list(self._paused):
            job = turn.job
            if blocked and now - turn.since > YIELD:
                job.cut, blocked = True, False  # one at a time
            if job.gone or job.cut or not job.full():
                self._paused.remove(turn)
                tasks.append(turn)

    def _round(self) -> None:
        """One step for all that write, and one chunk of one that reads."""
        now = time.monotonic()
        read, written = self.metrics.read_seconds, self.metrics.written_tokens
        for turn, error in cast(
            "list[tuple[_Turn, Exception | None]]", self.batch.scheduler.schedule()
        ):
            if error is None:
                self.slots.release(turn.slot)
                turn.job.post(Ended())
            elif isinstance(error, ApiError):
                self.slots.release(turn.slot)
                turn.job.post(Ended(error))
            else:
                self.slots.drop(turn.slot)
                self._failed(turn.job, error)
        if self.metrics.written_tokens > written:
            seconds = time.monotonic() - now - (self.metrics.read_seconds - read)
            self.metrics.decode_seconds += max(0.0, seconds)

    def _failed(self, job: Job, error: Exception) -> None:
        if not isinstance(error, (ApiError, EngineError)):
            traceback.print_exception(error)
        job.post(Ended(error))

    # ---------------------------------------------------------------- one answer

    def _work(self, job: Job, session: Session, cached: int) -> Work:
        """Read the prompt chunk by chunk, write the choices one after the other, keep what was
        read. Each `yield` names what it waits for.
        """
        total = len(job.ids)
        held, last = cached, time.monotonic()
        flops = partial(session.runtime.prompt_flops, PrefillFlops.of(self.llm.config))
        eta = Eta(flops, cached, total)

        def read(done: int, seconds: float) -> None:
            nonlocal held, last
            now = time.monotonic()
            self.metrics.read(cached + done - held, seconds)
            eta.add(held, cached + done, now - last)  # with what others take between the chunks
            held, last = cached + done, now
            job.post(Reading(held, total, cached, eta.left(held)))

        for chunk in self.batch.reading(session, job.ids[cached:], read):
            yield chunk
            if job.gone:
                return
            if job.cut:
                raise ApiError(503, "the prompt was not read in time", code="timeout")
        for choice in range(job.choices):
            if choice:
                session.truncate(total)
            yield from self._write(job, session, choice)
        if self.cache is not None and not job.gone:
            for _ in self.cache.storing(session):
                yield WAIT_FOR_TURN

    def _write(self, job: Job, session: Session, choice: int) -> Work:
        params = job.params
        if params.seed is not None:
            # choices differ, and each is the same again
            params = replace(params, seed=(params.seed + choice) % 2**63)
        if session.last_logits is None:
            session.refresh_logits()
        stats = GenerationStats(cached_tokens=len(session))
        if job.evidence is not None:
            job.evidence.begin(session)
        answer = written(session, params, stats, lambda: job.gone or job.cut)
        with closing(answer):
            for part in answer:
                if isinstance(part, DecodeRequest):
                    yield part
                    continue
                self.metrics.wrote(part.token_id is not None)
                top, evidence = tuple(part.top_logprobs), None
                reads: Sequence[Read] = ()
                if job.evidence is not None:
                    reads = job.evidence.add(session)
                    if part.finish_reason is not None:
                        yield WAIT_FOR_TURN  # comparing takes steps of its own
                        evidence = job.evidence.end(session, stats, lambda: job.gone or job.cut)
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
