"""Several conversations at once: sessions in slots, whose decode steps read the weights once.

A session of a batch is a Session like any other, with its own bank, method, tier and answer. Two
things are shared. The step: all sessions that generate decode together (engine/batch/step.py). The
time: between two steps one prompt advances by a chunk (engine/batch/scheduler.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import NamedTuple

import torch

from engine.base.checks import checked_ids, found, integer
from engine.base.errors import SessionClosed, SettingError
from engine.batch.chunking import ChunkBudget, WaitForTurn, prefill_in_chunks
from engine.batch.scheduler import Scheduler, Task, Work
from engine.batch.step import BatchedStep
from engine.forward.prefill import Outputs
from engine.load.loaded import Loaded
from engine.load.planner import Planner
from engine.methods.base import Method
from engine.runner.extend import with_logits
from engine.runner.rewind import replay
from engine.runner.rollback import exclusive, rewound_on_error, roll_back
from engine.runner.state import CLOSED_LINE, SessionState
from engine.runner.step import DecodeStep
from engine.sampling.params import SamplingParams
from engine.session.generate import written
from engine.session.results import GenerationStats, Piece
from engine.session.session import Session, open_session

Stepped = dict[SessionState, torch.Tensor | Exception]

MOST_SLOTS = 256


class _Fed(NamedTuple):
    """A token for the next step of a session that holds `length` tokens."""

    token_id: int | None
    length: int


class Batch:
    """Sessions that decode together; made by LLM.batch(). slots: the most open sessions; closing
    one frees its slot. Not thread-safe, like its sessions.

    pause: seconds that an answer may wait for a chunk of another's prompt, as far as chunks of 64
    tokens allow; None: a whole chunk (LLM.chunk). With a pause the borders of chunks follow the
    machine's speed, which changes answers by rounding.
    """

    def __init__(
        self, loaded: Loaded, planner: Planner, slots: int = 4, pause: float | None = None
    ) -> None:
        integer("slots", slots, 1, MOST_SLOTS)
        self.loaded, self.planner, self.slots = loaded, planner, slots
        self.chunk_budget = ChunkBudget(planner.chunk, pause)
        self._sessions: list[Session] = []
        self._fed: dict[SessionState, _Fed] = {}
        self._step = BatchedStep()
        self.scheduler = Scheduler(self.feed, self.take_back, self.step)
        self._pieces: deque[tuple[Session, Piece | Exception]] = deque()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all sessions."""
        for session in self.sessions:
            self.stop(session)
            session.close()
        self._step.forget(set())

    @property
    def sessions(self) -> list[Session]:
        """The open sessions."""
        self._sessions = [session for session in self._sessions if not session.closed]
        return list(self._sessions)

    def session(
        self,
        method: Method | None = None,
        max_context: int | None = None,
        offload: str | None = None,
    ) -> Session:
        """Open an empty session in a free slot; arguments as of LLM.session.

        Raises SettingError if no slot is free, or if the batch has a pause and the method cannot
        read a prompt in parts.
        """
        if len(self.sessions) >= self.slots:
            raise SettingError(
                f"batch: found {self.slots} open sessions, expected a free slot of slots="
                f"{self.slots}; close a session, or make the batch with more"
            )
        session = open_session(self.loaded, self.planner, method, max_context, offload)
        if self.chunk_budget.pause is not None and session.runtime.needs.final_call is None:
            session.close()
            raise SettingError(
                f"{session.method.name}: reads a whole prompt in one call, for which all others "
                f"wait; use another method, or a batch without pause"
            )
        self._sessions.append(session)
        return session

    # ---------------------------------------------------------------- one step

    def feed(self, session: Session, token_id: int | None) -> None:
        """Give `session` a token for the next step. None: the argmax of its logits.

        Raises the errors of Session.decode; the session has no token then.
        """
        self._require_mine(session)
        if token_id is not None:
            (token_id,) = checked_ids([token_id], self.loaded.config.vocab_size)
        session.require_room(len(session) + 1)
        replay(session)
        if token_id is None and session.last_logits is None:
            raise SettingError("batch: found no logits to choose from, expected a token id")
        self._fed[session] = _Fed(token_id, len(session))

    def take_back(self, session: SessionState) -> None:
        """Withdraw the token that the session was fed and has not taken, if there is one."""
        self._fed.pop(session, None)

    def _require_mine(self, session: Session) -> None:
        if session.closed:
            raise SessionClosed(CLOSED_LINE)
        if session not in self.sessions:
            raise SettingError("batch: found another's session, expected one of batch.session()")

    def step(self) -> Stepped:
        """Run one decode step for every session that was fed: {session: float32 logits [vocab]}.

        A session that fails is rolled back and has its exception in place of logits; the others are
        unaffected. An interrupt leaves every session before or after its step: before it, the
        session still has its token; after it, `last_logits` has the step's logits.
        """
        self._fed = {session: feed for session, feed in self._fed.items() if not session.closed}
        done: Stepped = {}
        if not self._fed:
            return done
        self._step.forget({session.runner for session in self.sessions})
        with exclusive(self.loaded), ExitStack() as whole:
            whole.callback(self._forget_taken)
            for session in self._fed:
                whole.enter_context(rewound_on_error(session))
            steps = []
            for session, feed in self._fed.items():
                step = self._guarded(session, done, partial(_prepared, session, feed))
                if step is not None:
                    steps.append(step)
            for group in _groups(steps):
                self._run(group, done)
        self._fed = {}
        return done

    def _forget_taken(self) -> None:
        """Keep the tokens of the sessions that have not taken them."""
        self._fed = {
            session: feed for session, feed in self._fed.items() if len(session) == feed.length
        }

    def _run(self, steps: list[DecodeStep], done: Stepped) -> None:
        """Run steps that belong to one batched step, and commit them."""
        logits: list[torch.Tensor | None] = [None] * len(steps)
        if len(steps) > 1:
            try:
                logits = list(self._step.run(steps))
            except Exception:
                # whose fault it is shows when each runs by itself
                for step in steps:
                    self._guarded(step.session, done, partial(_prepared_again, step))
        for step, mine in zip(steps, logits):
            if step.session not in done:
                self._guarded(step.session, done, partial(_committed, step, mine, done))

    def _guarded(
        self, session: SessionState, done: Stepped, work: Callable[[], DecodeStep | None]
    ) -> DecodeStep | None:
        """Return the result of `work`. If it fails, roll the session back, put its exception into
        `done` and return None.
        """
        try:
            with rewound_on_error(session):
                return work()
        except Exception as error:
            done[session] = error
            return None

    # ---------------------------------------------------------------- answers

    def write(
        self,
        session: Session,
        token_ids: Iterable[int],
        params: SamplingParams | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """Begin an answer, whose pieces come from `run`: read token_ids (empty: continue the text)
        chunk by chunk, then generate. should_stop() is asked before every step, as by
        Session.generate.

        Raises SettingError if the session generates already or belongs to another batch, and
        ContextTooLong if the tokens do not fit.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise SettingError(f"params: found {found(params)}, expected SamplingParams(...)")
        self._require_mine(session)
        if any(task.session is session for task in self.scheduler.tasks):
            raise SettingError("batch: found an answer under way in this session; stop it first")
        ids = list(token_ids)
        if ids or not len(session):
            ids = checked_ids(ids, self.loaded.config.vocab_size)
        session.require_room(len(session) + len(ids))
        self.scheduler.tasks.append(Task(session, self._answer(session, ids, params, should_stop)))

    def stop(self, session: Session) -> None:
        """End the session's answer, if there is one; the session keeps its tokens. No further piece
        of the answer follows, not even one that an interrupt has held up.
        """
        for task in [task for task in self.scheduler.tasks if task.session is session]:
            self.scheduler.end(task)
        self._pieces = deque(piece for piece in self._pieces if piece[0] is not session)

    def run(self) -> Iterator[tuple[Session, Piece | Exception]]:
        """Yield the pieces of all answers as they come, until all have ended. Answers may begin,
        and be stopped, between two pieces. The last piece of an answer has a finish_reason, or is
        the exception that ended it.
        """
        request = self.loaded.request()
        try:
            try:
                while self.scheduler.tasks or self._pieces:
                    with request.piece():
                        for task, error in self.scheduler.schedule():
                            if error is not None:
                                self._pieces.append((task.session, error))
                    while self._pieces:
                        yield self._pieces.popleft()
            finally:
                request.end()
        finally:
            request.end()  # an interrupt may have met the first

    def reading(
        self,
        session: Session,
        ids: Sequence[int],
        progress: Callable[[int, float], None] | None = None,
        every: Outputs | None = None,
    ) -> Iterator[WaitForTurn]:
        """Read a prompt, as a part of a task's work (see engine/batch/chunking.py)."""
        others = partial(self.scheduler.writing, but=session)
        return prefill_in_chunks(session, ids, self.chunk_budget, others, progress, every)

    def _answer(
        self,
        session: Session,
        ids: list[int],
        params: SamplingParams,
        should_stop: Callable[[], bool] | None,
    ) -> Work:
        stats = GenerationStats(cached_tokens=len(session), prompt_tokens=len(ids))
        before = session.counters.prefill_seconds
        yield from self.reading(session, ids)
        if session.last_logits is None:
            session.refresh_logits()
        stats.read_in(session.counters.prefill_seconds - before)
        with closing(written(session, params, stats, should_stop)) as parts:
            for part in parts:
                if isinstance(part, Piece):
                    self._pieces.append((session, part))
                else:
                    yield part


def _prepared(session: SessionState, feed: _Fed) -> DecodeStep | None:
    """Return the step that was fed; None if the session took it already, or was truncated since."""
    replay(session)  # an interrupt may have left it inconsistent since `feed`
    if len(session) != feed.length:
        return None
    if feed.token_id is None and session.last_logits is None:
        with_logits(session)
    step = DecodeStep(session, feed.token_id)
    step.prepare()
    return step


def _prepared_again(step: DecodeStep) -> None:
    roll_back(step.session)
    step.prepare()


def _committed(step: DecodeStep, logits: torch.Tensor | None, done: Stepped) -> None:
    """Commit a step; run it first if `logits` is None."""
    done[step.session] = step.commit(step.run() if logits is None else logits)


def _groups(steps: list[DecodeStep]) -> list[list[DecodeStep]]:
    """Group the steps that run together, by backend. A step that is not batchable is alone."""
    by_backend: dict[str, list[DecodeStep]] = {}
    for step in steps:
        if step.batchable:
            by_backend.setdefault(step.session.backend, []).append(step)
    return [*by_backend.values(), *([step] for step in steps if not step.batchable)]
