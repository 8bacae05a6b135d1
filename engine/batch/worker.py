"""The one thread that owns the model and answers everybody's requests, first come, first served.
Those that write take one step together, and between two steps one of the others reads a chunk of
its prompt, so that nobody's tokens stop for longer than that. The server (engine/serve/worker) and
programs (engine/asynchronous/) run it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar, cast

from engine.base.errors import Busy, TimedOut, WorkerClosed
from engine.base.lock import RequestLock
from engine.batch.batch import Batch
from engine.batch.chunking import WaitForTurn
from engine.batch.scheduler import Task, Work
from engine.batch.slots import Slot, Slots
from engine.forward.scores import PromptScores
from engine.methods.base import Method
from engine.plan.prefill_time import Eta, PrefillFlops, PrefillProgress
from engine.sampling.params import SamplingParams
from engine.saved.cache import BlockCache
from engine.session.generate import written
from engine.session.results import DecodeRequest, GenerationStats
from engine.session.session import Session

ENDING = "this worker is ending: nothing new is answered"


@dataclass(frozen=True)
class Reading:
    """How far a prompt is read. cached: tokens that were held before. progress: of the others."""

    cached: int
    progress: PrefillProgress

    @property
    def done(self) -> int:
        """Tokens of the prompt that are held."""
        return self.cached + self.progress.done

    @property
    def total(self) -> int:
        """Tokens of the prompt."""
        return self.cached + self.progress.total

    @property
    def left(self) -> float | None:
        """Seconds; None: not known yet."""
        return self.progress.eta


@dataclass(frozen=True)
class Ended:
    """The last event of a job; error: what cut it."""

    error: Exception | None = None


@dataclass(eq=False)
class Job:
    """One request. post is called in the worker's thread with each event: Reading, then what the
    worker's `work` posts (a Piece each), and Ended as the last.

    method: what the answer is read and written with; None: as the session is.
    full: whether the client is behind with reading, so that the answer should pause.
    owner: whose key asked. scores: takes log probabilities of all of `ids`, which are read anew.
    gone: the client has left. cut: the worker ends and the answer with it.
    """

    ids: list[int]
    params: SamplingParams
    post: Callable[[Any], None]
    method: Method | None = None
    full: Callable[[], bool] = bool
    owner: bytes = b""
    scores: PromptScores | None = None
    gone: bool = False
    cut: bool = False
    since: float = field(default_factory=time.monotonic)

    def leave(self) -> None:
        """Note that the client has left, from any thread."""
        self.gone = True

    def over(self) -> bool:
        """Whether nothing more should be written."""
        return self.gone or self.cut


J = TypeVar("J", bound=Job)


@dataclass(eq=False)
class Turn(Task, Generic[J]):
    """An answer under way, of a job in a slot. since: when it was paused."""

    job: J = field(kw_only=True)
    slot: Slot = field(kw_only=True)
    since: float = 0.0


class Worker(Generic[J]):
    """Serves jobs from a queue on one thread, which `start` begins and `stop` ends.

    batch: its slots are the answers at once; their sessions stay open, and a prompt that begins as
    one of them does is read from there on. waiting: most jobs that wait for a slot; None: any
    number. cache: where prompts are looked up. Another request of the same LLM takes turns with the
    rounds of this thread, which waits for it.
    """

    def __init__(
        self, batch: Batch, waiting: int | None = None, cache: BlockCache | None = None
    ) -> None:
        self.batch, self.most_waiting, self.cache = batch, waiting, cache
        self.slots = Slots(batch, cache)
        self._lock = RequestLock(True, batch.loaded.lock)
        self._waiting: deque[J] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._changed = threading.Condition()
        self._ending = False
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the thread serves."""
        return self._thread.is_alive()

    def submit(self, job: J) -> None:
        """Queue a job. Raises Busy where too many wait, and WorkerClosed."""
        with self._changed:
            self._require_open()
            if self._full():
                # the model's thread takes from the left meanwhile
                for left in [job for job in list(self._waiting) if job.gone]:
                    with contextlib.suppress(ValueError):
                        self._waiting.remove(left)
                if self._full():
                    raise Busy(f"{self.most_waiting} requests are waiting already; try again later")
            self._waiting.append(job)
            self._changed.notify()

    def _full(self) -> bool:
        """Whether as many wait as may, beside those for whom there are slots."""
        if self.most_waiting is None:
            return False
        return len(self._waiting) >= self.most_waiting + self.slots.count - self.running

    def between(self, call: Callable[[], None]) -> None:
        """Run a short call on this thread, between two rounds. It must not raise. Raises
        WorkerClosed.
        """
        with self._changed:
            self._require_open()
            self._calls.append(call)
            self._changed.notify()

    def _require_open(self) -> None:
        if self._ending or (self._thread.ident is not None and not self._thread.is_alive()):
            raise WorkerClosed(ENDING)

    def end(self, grace: float) -> None:
        """Refuse what waits, and cut answers that last longer than `grace` seconds; from any
        thread, at once.
        """
        with self._changed:
            self._ending = True
            self._deadline = min(self._deadline, time.monotonic() + grace)
            self._changed.notify()

    def stop(self, grace: float) -> None:
        """As `end`; returns when all sessions are closed."""
        self.end(grace)
        self._thread.join()

    @property
    def waiting(self) -> int:
        """Jobs that wait for a slot, and whose clients wait for them."""
        return sum(not job.gone for job in list(self._waiting))

    @property
    def running(self) -> int:
        """Answers under way."""
        return len(self.turns)

    @property
    def turns(self) -> list[Turn[J]]:
        """Answers under way, in the order in which they read."""
        return cast("list[Turn[J]]", self.batch.scheduler.tasks)

    # ---------------------------------------------------------------- what a program adds

    def tend(self) -> None:
        """Look after the answers under way, before every round."""
        if time.monotonic() > self._deadline:
            for turn in self.turns:
                turn.job.cut = True

    def patience(self) -> float | None:
        """Seconds until the next look where nothing runs; None: until something is asked."""
        return None

    def began(self, job: J, cached: int) -> None:
        """Note that a job got a slot that held `cached` of its tokens."""

    def was_read(self, tokens: int, seconds: float) -> None:
        """Note that a chunk was read."""

    def failed(self, job: J, error: Exception) -> None:
        """End a job that something went wrong with."""
        job.post(Ended(error))

    def work(self, job: J, session: Session, cached: int) -> Work:
        """Read the prompt and write the answer. Each `yield` names what it waits for."""
        before = session.counters.prefill_seconds
        if not (yield from self.read(job, session, cached)):
            return
        stats = GenerationStats(cached_tokens=cached, prompt_tokens=len(job.ids) - cached)
        stats.read_in(session.counters.prefill_seconds - before)
        with closing(written(session, job.params, stats, job.over)) as parts:
            for part in parts:
                if isinstance(part, DecodeRequest):
                    yield part
                else:
                    job.post(part)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:  # a fault here: nobody may wait for ever
            self.end(0.0)
            for job in [*(turn.job for turn in self.turns), *self._waiting]:
                job.post(Ended(error if isinstance(error, Exception) else WorkerClosed(ENDING)))
            raise
        finally:
            self.slots.close()

    def _serve(self) -> None:
        while True:
            while self._calls:
                self._calls.popleft()()
            self._admit()
            self.tend()
            if self.turns:
                self.advance()
                continue
            with self._changed:
                seconds = self.patience()
                if self._calls or (self._waiting and seconds is None):
                    continue
                if self._ending and seconds is None:
                    return
                self._changed.wait(seconds)

    def _admit(self) -> None:
        """Begin waiting jobs as long as there are slots."""
        while self._waiting and (self.slots.free or self._ending):
            job = self._waiting.popleft()
            if self._ending:
                job.post(Ended(WorkerClosed(ENDING)))
                continue
            if job.gone:
                job.post(Ended())
                continue
            try:
                with self._lock.held():
                    slot, cached = self.slots.take(job.ids, job.method, job.scores is not None)
                slot.owner = job.owner
            except Exception as error:
                self.failed(job, error)
                continue
            self.began(job, cached)
            whole = PrefillProgress(0, len(job.ids) - cached, 0.0, 0.0, None)
            job.post(Reading(cached, whole))
            work = self.work(job, slot.session, cached)
            self.batch.scheduler.tasks.append(Turn(slot.session, work, job=job, slot=slot))

    def advance(self) -> None:
        """One step for all that write, and one chunk of one that reads."""
        with self._lock.held():
            ended = self.batch.scheduler.schedule()
        for turn, error in cast("list[tuple[Turn[J], Exception | None]]", ended):
            if error is None:
                self.slots.release(turn.slot)
                turn.job.post(Ended())
            elif isinstance(error, (TimedOut, WorkerClosed)):
                self.slots.release(turn.slot)
                turn.job.post(Ended(error))
            else:
                self.slots.drop(turn.slot)
                self.failed(turn.job, error)

    # ---------------------------------------------------------------- one prompt

    def read(
        self, job: J, session: Session, cached: int
    ) -> Generator[DecodeRequest | WaitForTurn, None, bool]:
        """Read the prompt chunk by chunk, as a part of a job's work; whether the client is still
        there. Afterwards the session has logits.
        """
        total = len(job.ids)
        held, last = cached, time.monotonic()
        flops, runtime = PrefillFlops.of(self.batch.loaded.config), session.runtime
        passes = runtime.passes_flops(flops, cached, total)
        eta = Eta(partial(runtime.prompt_flops, flops), cached, total, passes)

        def read(done: int, seconds: float) -> None:
            nonlocal held, last
            now = time.monotonic()
            self.was_read(cached + done - held, seconds)
            eta.add(held, cached + done, now - last)  # with what others take between the chunks
            held, last = cached + done, now
            eta.repeated(float(held == total))
            job.post(Reading(cached, eta.progress(held)))

        every = job.scores.take if job.scores is not None else None
        for chunk in self.batch.reading(session, job.ids[cached:], read, every):
            yield chunk
            if job.gone:
                return False
            if job.cut:
                why = "the prompt was not read in time"
                raise WorkerClosed(f"{why}: {ENDING}") if self._ending else TimedOut(why)
        if session.last_logits is None:
            session.refresh_logits()
        return True
