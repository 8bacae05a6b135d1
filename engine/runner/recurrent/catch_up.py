"""Run the recurrent layers over tokens whose rows are in the bank already, to where their state is
wanted.

Going back cuts the bank at once. The state stands at the nearest savepoint then, behind the bank,
and whoever needs it next calls `catch_up`: interrupted, it goes on from where it came to. A token
that was read, or decoded by full attention, runs in a chunk over the bank's rows; one that a sparse
step decoded runs as that step again. No row of the bank changes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from functools import partial

import torch

from engine.bank.recurrent.state import RecurrentState
from engine.bank.row_origins import FULL
from engine.base.interrupts import complete
from engine.forward.decode import Decoder
from engine.forward.prefill import run_chunk
from engine.plan.needs import MOST_WINDOW
from engine.plan.prefill_time import Eta, PrefillFlops, Progress
from engine.runner.state import SessionState
from engine.runner.step_runner import StepRunner


def behind(session: SessionState) -> int:
    """Return how many tokens the state of recurrent layers stands behind the bank."""
    state = session.bank.recurrent
    return 0 if state is None else len(session.committed) - state.length


def catch_up(session: SessionState, progress: Progress | None = None) -> None:
    """Bring the state to the session's length. Call inside `exclusive()` and
    `rewound_on_error()`.
    """
    if not behind(session):
        return
    session.take_time(wait=True)
    began, first = time.perf_counter(), session.stand_back(len(session.committed))
    state = session.bank.recurrent
    assert state is not None
    try:
        _run(session, session.runner, len(session.committed), progress, keep=True)
    finally:
        session.counters.count_again(state.length - first, time.perf_counter() - began)


@contextlib.contextmanager
def standing_at(session: SessionState, first: int, runner: StepRunner) -> Iterator[None]:
    """Have the state of recurrent layers at `first` tokens inside, where the bank holds more; it
    comes back afterwards. Query ring and savepoints stay. A model without such layers needs
    nothing.
    """
    state = session.bank.recurrent
    if state is None or state.base <= first <= state.length:
        yield
        return
    held, slots = state.aside(), session.query_ring.slots.clone()
    valid = session.query_ring.low, session.query_ring.high
    points = session.history.states.points

    def back() -> None:
        state.put_back(held)
        session.query_ring.slots.copy_(slots)
        session.query_ring.set_valid(*valid)
        session.history.states.keep(points)

    try:
        state.rewind(0)
        session.stand_back(first)
        _run(session, runner, first, None, keep=False)
        yield
    finally:
        complete(back)


def _run(
    session: SessionState, runner: StepRunner, n: int, progress: Progress | None, keep: bool
) -> None:
    """Run from where the state stands to n tokens. keep: savepoints on the way."""
    state, window = session.bank.recurrent, runner.runtime.needs.window
    assert state is not None
    parts = _parts(session, runner, state.length, n)
    steps = next((first for first, _, stepped in parts if stepped), None)
    if steps is not None and not session.query_ring.covers(max(0, steps - window), steps):
        # the queries that a selection reads come with the tokens before it
        session.stand_back(max(0, steps - window), again=True)
        parts = _parts(session, runner, state.length, n)
    eta = Eta(
        partial(runner.runtime.prompt_flops, PrefillFlops.of(session.loaded.config)),
        state.length,
        n,
    )
    for first, stop, stepped in parts:
        began = time.perf_counter()
        if stepped:
            _step_again(session, runner, state, first)
        else:
            _chunk_again(session, runner, state, first, stop)
        eta.add(first, stop, time.perf_counter() - began)
        if keep:
            session.keep_state()
        if progress is not None:
            progress(eta.progress(stop))


def _parts(
    session: SessionState, runner: StepRunner, first: int, n: int
) -> list[tuple[int, int, bool]]:
    """(first, stop, whether it is a step) of what runs to bring the state from `first` to n."""
    found: list[tuple[int, int, bool]] = []
    spans = session.origins.of(first, n)
    for stop, origin in (*spans, (n, FULL)):
        while first < stop:
            stepped = origin is None and runner.steps_again(first + 1)
            last = first + 1
            if not stepped:
                last = min(stop, first + session.planner.chunk)
                if origin is None:  # up to where steps are sparse
                    last = next(
                        (i for i in range(first + 1, last) if runner.steps_again(i + 1)), last
                    )
            found.append((first, last, stepped))
            first = last
    return found


def _chunk_again(
    session: SessionState, runner: StepRunner, state: RecurrentState, first: int, stop: int
) -> None:
    model, ring = runner.model, session.query_ring
    tokens = torch.tensor([session.committed[first:stop]], dtype=torch.int64, device=model.device)
    where = session.loaded.rotary, runner.dense_runtime, runner.bank, tokens, first, stop
    _, newest = run_chunk(
        model, *where, write=False, pieces=runner.prompt_pieces, backend=runner.backend
    )
    count = min(newest.shape[2], stop - first, MOST_WINDOW)
    ring.truncate(first)
    ring.reserve(stop)
    ring.write_chunk(newest[:, :, -count:], stop)
    state.commit(stop)
    ring.extend(stop, count)


def _step_again(session: SessionState, runner: StepRunner, state: RecurrentState, at: int) -> None:
    ring = session.query_ring
    ring.truncate(at)
    decoder = Decoder(runner.model, session.loaded.rotary, runner.runtime, ring, runner.halves)
    runner.feed(session.committed[at], at + 1)
    try:
        with session.bank.replaying(at + 1):
            runner.run_with(decoder)
    finally:
        runner.runtime.truncate(at)  # it has looked at a row that is gone
    state.commit(at + 1)
    ring.extend(at + 1, 1)
