"""A decode step of several sessions: each prepared, those that can run together, each committed by
itself. Over several ranks every process takes the same step over its own copies of the sessions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch

from engine.base.errors import OutOfHostMemory, RankLost
from engine.base.figures import first_line
from engine.batch.step import BatchedStep
from engine.load.loaded import Loaded
from engine.runner.extend import with_logits
from engine.runner.rewind import replay
from engine.runner.rollback import exclusive, rewound_on_error, roll_back
from engine.runner.state import SessionState
from engine.runner.step import DecodeStep
from engine.runner.step_runner import StepRunner

Stepped = dict[SessionState, torch.Tensor | Exception]


class Fed(NamedTuple):
    """A token for the next step of a session that holds `length` tokens; None: the argmax of its
    logits.
    """

    token_id: int | None
    length: int


class Stepping:
    """Takes steps of sessions of one model."""

    def __init__(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self._step = BatchedStep()

    def forget(self, runners: set[StepRunner]) -> None:
        """Drop what is kept for all runners but these."""
        self._step.forget(runners)

    def step(self, fed: dict[SessionState, Fed]) -> Stepped:
        """Run one decode step for every session that was fed: {session: float32 logits [vocab]}.

        A session that fails is rolled back and has its exception in place of logits; the others are
        unaffected. Over ranks it fails on all of them, and what fails in a step that several take
        fails in each. An interrupt leaves every session before or after its step.
        """
        done: Stepped = {}
        with exclusive(self._loaded), ExitStack() as whole:
            for session in fed:
                whole.enter_context(rewound_on_error(session))
            steps = []
            for session, feed in fed.items():
                step = _guarded(session, done, partial(_prepared, session, feed))
                self._agree(session, done)
                if step is not None and session not in done:
                    steps.append(step)
            for group in _groups(steps):
                self._run(group, done)
        return done

    def _agree(self, session: SessionState, done: Stepped) -> None:
        """Have a session whose step one rank could not prepare fail on all of them."""
        peers, error = self._loaded.peers, done.get(session)
        if peers is None or not any(failed for (failed,) in peers.said(error is not None)):
            return
        assert not isinstance(error, torch.Tensor)
        lines = peers.texts("" if error is None else first_line(error) or type(error).__name__)
        if error is None:
            roll_back(session)
            done[session] = OutOfHostMemory(next(filter(None, lines)))

    def _run(self, steps: list[DecodeStep], done: Stepped) -> None:
        """Run steps that belong to one batched step, and commit them."""
        logits: list[torch.Tensor | None] = [None] * len(steps)
        alone = self._loaded.peers is None
        if len(steps) > 1:
            try:
                logits = list(self._step.run(steps))
            except Exception:
                if not alone:
                    raise  # another rank may have come through
                # whose fault it is shows when each runs by itself
                for step in steps:
                    _guarded(step.session, done, partial(_prepared_again, step))
        for step, mine in zip(steps, logits):
            work = partial(_committed, step, mine, done)
            if not alone:
                work()
            elif step.session not in done:
                _guarded(step.session, done, work)


def _guarded(
    session: SessionState, done: Stepped, work: Callable[[], DecodeStep | None]
) -> DecodeStep | None:
    """Return the result of `work`. If it fails, roll the session back, put its exception into
    `done` and return None.
    """
    try:
        with rewound_on_error(session):
            return work()
    except RankLost:
        raise
    except Exception as error:
        done[session] = error
        return None


def _prepared(session: SessionState, feed: Fed) -> DecodeStep | None:
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
