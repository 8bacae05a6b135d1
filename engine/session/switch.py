"""Switch of a session to another method or other launchers. The new runner and bank are built
beside the old ones and taken at the end, so an interrupt or an error leaves the session unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from engine.bank.base import Bank
from engine.bank.near.near_bank import NearBank
from engine.base.checks import callables
from engine.base.interrupts import complete
from engine.exact.runner import runner_of
from engine.methods.base import Method
from engine.plan.layers import LayerPlan
from engine.plan.needs import Needs
from engine.plan.placement import Placement
from engine.plan.prefill_time import Progress
from engine.runner.history import PendingReplay, Savepoint
from engine.runner.ranks.led import led
from engine.runner.rewind import replay, rows_lost, switched
from engine.runner.state import SessionState
from engine.runner.step_runner import StepRunner

S = TypeVar("S", bound=SessionState)


def new_runner(
    session: SessionState, method: Method, plan: LayerPlan, backend: str, bank: Bank
) -> StepRunner:
    """Make the runner of a session's steps under a method, over `bank`."""
    runner = runner_of(session, method, plan, backend, bank)
    runner.runtime.bank = bank
    return runner


@led
def switch(
    session: SessionState,
    method: Method,
    plan: LayerPlan,
    backend: str,
    placement: Placement | None,
    progress: Progress | None = None,
) -> None:
    """Make a session go on with a method, its layer plan, a backend and a placement of the bank."""
    callables(progress=progress)
    # not exclusive(): tensors that are made here are written to outside inference mode too
    with session.loaded.busy():
        again = session.bank.lacks and method != session.method
        if not again or session.history.pending is None:
            replay(session, progress)
        old, needs = session.bank, _needs(session, method, plan)
        again = again or reads_again(session, method, needs)
        if needs.lacks != old.lacks or (again and old.lacks):
            bank = session.new_bank(plan, needs, placement)
        else:
            bank = old.relayout(plan, placement)
        try:
            runner = new_runner(session, method, plan, backend, bank)
            points = [] if again else _brought(session, runner, progress)
        except BaseException:
            complete(bank.close if bank is not old else partial(old.relayout, session.plan))
            raise
        ids = session.ids.copy()

        def take() -> None:
            session.go_on(runner, points)
            if again:
                session.rewind(0)
                session.learn(None)  # they were the method's before; reading leaves new ones
                again_as = PendingReplay(ids, [Savepoint(0, len(ids) + 1)]) if ids else None
                session.history.postpone(again_as)
            session.keep_queries()
            if bank is not old:
                old.close()

        complete(take)
        if again:
            replay(session, progress)


def reads_again(session: SessionState, method: Method, needs: Needs) -> bool:
    """Return whether a session reads all its tokens again to go on with a method of such needs:
    where their rows are gone.
    """
    if method == session.method:
        return False
    kept = needs.history != "store" or not rows_lost(session, needs, len(session.ids))
    return session.bank.lacks or not kept


def _needs(session: SessionState, method: Method, plan: LayerPlan) -> Needs:
    loaded = session.loaded
    return method.needs(plan, loaded.config, session.capacity, loaded.dtype.itemsize)


def _brought(
    session: SessionState, runner: StepRunner, progress: Progress | None
) -> list[Savepoint]:
    """Bring a new runner to the session's length, as `switched`; one that forgets makes its store
    of the rows of the session's bank, or copies those that it keeps.
    """
    bank, old, n = runner.bank, session.bank, len(session.committed)
    if isinstance(bank, NearBank) and bank is not old:
        with torch.inference_mode():
            bank.copy_from(old, n)
    if not bank.forgets or old.forgets:
        return switched(session, runner, progress)
    bank.read_from(old)
    points = switched(session, runner, progress)
    bank.settle(runner.runtime.waiting_from(n), n)
    return points


def fork(session: SessionState, open_session: Callable[..., S]) -> S:
    """Copy a session's rows and state into a new one of the same capacity, backend and watch.

    open_session: makes it, as engine.session.session.open_session.
    """
    loaded, planner = session.loaded, session.planner
    # not exclusive(): tensors that are made here are written to outside inference mode too
    with loaded.busy():
        replay(session)
        rows = None if session.endless else session.capacity
        copy = open_session(loaded, planner, session.method, rows, session.offload)
        try:
            if copy.backend != session.backend:
                switch(copy, copy.method, copy.plan, session.backend, copy.bank.placement)
            with torch.inference_mode():
                copy.bank.copy_from(session.bank, len(session.committed))
            copy.copy_state(session)
        except BaseException:
            copy.close()
            raise
    return copy
