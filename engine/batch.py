"""Several conversations at once: sessions in slots, whose decode steps read the weights once.

A session of a batch is a Session like any other, with its own bank, method, tier and answer. What
is shared is the step (engine/batch_step.py), and the time: those that write take a step together,
and between two steps one of those that still read advances by a chunk (engine/rounds.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from engine.batch_step import BatchStep
from engine.errors import SessionClosed, SettingError
from engine.generate import GenerationStats, Piece, written
from engine.guard import CLOSED_LINE, exclusive, go_back, rewound_on_error
from engine.newcomers import Chunk, Pace, read_beside
from engine.pending_step import PendingStep
from engine.rounds import Rounds, Task, Work
from engine.sampling import SamplingParams
from engine.settings import checked_ids, found, integer

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.methods.base import Method
    from engine.session import Session

    Stepped = dict[Session, torch.Tensor | Exception]

MOST_SLOTS = 256


class _Fed(NamedTuple):
    """A token that a session of `length` tokens is to take."""

    token_id: int | None
    length: int


class Batch:
    """Made by LLM.batch(). At most `slots` sessions that are open; closing one frees its slot.

    pause: seconds that an answer may wait for a chunk of another's prompt, as far as chunks of 64
    tokens allow; None: a whole chunk (LLM.chunk). With a pause the borders of chunks follow the
    machine's speed, which changes answers by rounding. Not thread-safe, like its sessions.
    """

    def __init__(self, llm: LLM, slots: int = 4, pause: float | None = None) -> None:
        integer("slots", slots, 1, MOST_SLOTS)
        self.llm, self.slots = llm, slots
        self.pace = Pace(llm.chunk, pause)
        self._sessions: list[Session] = []
        self._fed: dict[Session, _Fed] = {}
        self._step = BatchStep()
        self.rounds = Rounds(self)
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
        """A new, empty session in a free slot; arguments as of LLM.session. Raises SettingError
        where there is none, or where the method cannot read a prompt in parts and the batch has a
        pause.
        """
        if len(self.sessions) >= self.slots:
            raise SettingError(
                f"batch: found {self.slots} open sessions, expected a free slot of slots="
                f"{self.slots}; close a session, or make the batch with more"
            )
        session = self.llm.session(method, max_context, offload)
        if self.pace.pause is not None and session.runtime.needs.final_call is None:
            session.close()
            raise SettingError(
                f"{session.method.name}: reads a whole prompt in one call, for which all others "
                f"wait; use another method, or a batch without pause"
            )
        self._sessions.append(session)
        return session

    # ---------------------------------------------------------------- one step

    def feed(self, session: Session, token_id: int | None) -> None:
        """Have `session` take a token in the next step. None: the likeliest one after its logits.

        Raises what Session.decode raises; nothing is fed then.
        """
        self._require_mine(session)
        if token_id is not None:
            (token_id,) = checked_ids([token_id], self.llm.config.vocab_size)
        session.require_room(len(session) + 1)
        session.history.catch_up()
        if token_id is None and session.last_logits is None:
            raise SettingError("batch: found no logits to choose from, expected a token id")
        self._fed[session] = _Fed(token_id, len(session))

    def _require_mine(self, session: Session) -> None:
        if session.closed:
            raise SessionClosed(CLOSED_LINE)
        if session not in self.sessions:
            raise SettingError("batch: found another's session, expected one of batch.session()")

    def step(self) -> Stepped:
        """Run one decode step for every session that was fed: {session: float32 logits [vocab]}.

        A session that fails has its exception in place of logits, and is as it was before; nobody
        else notices. An interrupt leaves every session before or after its step, and those before
        it still fed.
        """
        fed = {
            session: feed
            for session, feed in self._fed.items()
            if not session.closed and len(session.committed) == feed.length
        }
        self._fed = fed
        done: Stepped = {}
        if not fed:
            return done
        self._step.forget({session.runner for session in self.sessions})
        with exclusive(self.llm), ExitStack() as whole:
            for session in list(fed):
                whole.enter_context(rewound_on_error(session))
            steps = []
            for session, feed in list(fed.items()):
                step = self._guarded(session, done, partial(_prepared, session, feed.token_id))
                if step is not None:
                    steps.append(step)
            for group in _groups(steps):
                self._run(group, done)
        return done

    def _run(self, steps: list[PendingStep], done: Stepped) -> None:
        """Run steps that share, and commit them."""
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
            self._fed.pop(step.session, None)

    def _guarded(
        self, session: Session, done: Stepped, work: Callable[[], PendingStep | None]
    ) -> PendingStep | None:
        """What `work` returns; where it fails, the session goes back and `done` has its error."""
        try:
            with rewound_on_error(session):
                return work()
        except Exception as error:
            done[session] = error
            self._fed.pop(session, None)
            return None

    # ---------------------------------------------------------------- answers

    def write(
        self,
        session: Session,
        token_ids: Iterable[int],
        params: SamplingParams | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """Begin an answer, whose pieces come from `run`: read token_ids (none, to go on) chunk by
        chunk, then write. should_stop() is asked before every step, as by Session.generate.

        Raises SettingError where the session writes already or is not this batch's, ContextTooLong
        where the tokens do not fit.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise SettingError(f"params: found {found(params)}, expected SamplingParams(...)")
        self._require_mine(session)
        if any(task.session is session for task in self.rounds.tasks):
            raise SettingError("batch: found an answer under way in this session; stop it first")
        ids = list(token_ids)
        if ids or not len(session):
            ids = checked_ids(ids, self.llm.config.vocab_size)
        session.require_room(len(session) + len(ids))
        self.rounds.tasks.append(Task(session, self._answer(session, ids, params, should_stop)))

    def stop(self, session: Session) -> None:
        """End the session's answer, if it writes one; what it holds stays."""
        for task in [task for task in self.rounds.tasks if task.session is session]:
            self.rounds.end(task)

    def run(self) -> Iterator[tuple[Session, Piece | Exception]]:
        """The pieces of all answers, as they come, until all have ended. Answers may begin, and be
        stopped, between two pieces. The last of an answer is a Piece with a finish_reason, or the
        exception that ended it.
        """
        request = self.llm.request()
        try:
            while self.rounds.tasks or self._pieces:
                with request.piece():
                    for task, error in self.rounds.round():
                        if error is not None:
                            self._pieces.append((task.session, error))
                while self._pieces:
                    yield self._pieces.popleft()
        finally:
            request.end()

    def reading(
        self,
        session: Session,
        ids: Sequence[int],
        progress: Callable[[int, float], None] | None = None,
    ) -> Iterator[Chunk]:
        """Part of a task's work: read a prompt (see engine/newcomers.py)."""
        others = partial(self.rounds.writing, but=session)
        return read_beside(session, ids, self.pace, others, progress)

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
        stats.prefill_seconds = session.counters.prefill_seconds - before
        with closing(written(session, params, stats, should_stop)) as parts:
            for part in parts:
                if isinstance(part, Piece):
                    self._pieces.append((session, part))
                else:
                    yield part


def _prepared(session: Session, token_id: int | None) -> PendingStep:
    step = PendingStep(session, token_id)
    step.prepare()
    return step


def _prepared_again(step: PendingStep) -> None:
    go_back(step.session)
    step.prepare()


def _committed(step: PendingStep, logits: torch.Tensor | None, done: Stepped) -> None:
    """Commit a step that ran, or run it first."""
    done[step.session] = step.commit(step.run() if logits is None else logits)


def _groups(steps: list[PendingStep]) -> list[list[PendingStep]]:
    """Steps that run together: those on the same launchers. One that cannot share is alone."""
    by_backend: dict[str, list[PendingStep]] = {}
    for step in steps:
        if step.shares:
            by_backend.setdefault(step.session.backend, []).append(step)
    return [*by_backend.values(), *([step] for step in steps if not step.shares)]
