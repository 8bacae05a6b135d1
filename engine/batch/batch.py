"""Several conversations at once: sessions in slots, whose decode steps read the weights once.

A session of a batch is a Session like any other, with its own bank, method, tier and answer. Two
things are shared. The step: all sessions that generate decode together (engine/batch/step.py). The
time: between two steps one prompt advances by a chunk (engine/batch/scheduler.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial

from engine.base.checks import checked_ids, found, integer
from engine.base.errors import SessionClosed, SettingError
from engine.batch.chunking import ChunkBudget, WaitForTurn, prefill_in_chunks
from engine.batch.scheduler import Scheduler, Task, Work
from engine.batch.stepping import Fed, Stepped, Stepping
from engine.forward.prefill import Outputs
from engine.load.loaded import Loaded
from engine.load.planner import Planner
from engine.methods.base import Method
from engine.runner.extend import caught_up
from engine.runner.state import CLOSED_LINE, SessionState
from engine.sampling.params import SamplingParams
from engine.session.generate import written
from engine.session.results import GenerationStats, Piece
from engine.session.session import Session, open_session

MOST_SLOTS = 256


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
        self._fed: dict[SessionState, Fed] = {}
        self._stepping = Stepping(loaded)
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
        self._stepping.forget(set())

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
        opens = partial(open_session, self.loaded, self.planner, method, max_context, offload)
        session: Session
        if (lead := self.loaded.lead) is None:
            session = opens()
        else:
            given = dict(method=method, max_context=max_context, offload=offload)
            session = lead.open(opens, **given)
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
        if session.history.pending is not None:
            caught_up(session)
        if token_id is None and session.last_logits is None:
            raise SettingError("batch: found no logits to choose from, expected a token id")
        self._fed[session] = Fed(token_id, len(session))

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
        if not self._fed:
            return {}
        self._stepping.forget({session.runner for session in self.sessions})
        fed, lead = self._fed, self.loaded.lead
        work = partial(self._stepping.step, fed)
        try:
            done: Stepped = work() if lead is None else lead.step(fed, work)
        except BaseException:
            # keep the tokens of the sessions that have not taken them
            self._fed = {
                s: feed for s, feed in fed.items() if not s.closed and len(s) == feed.length
            }
            raise
        self._fed = {}
        return done

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
