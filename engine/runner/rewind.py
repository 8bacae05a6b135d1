"""Rewind and replay: a session returns to an earlier length, or continues with another method.

A savepoint is kept at the end of every prompt. A length between two savepoints is restored in one
of three ways, depending on the source of the method's state (`Needs.history`):

  bank    Every token is in the bank. Truncating sets its length.
  store   Rows were evicted. The store of the last savepoint is rebuilt; later tokens are replayed.
          A session that forgets keeps the stores of few savepoints, with their rows, and replays
          from the last one that it has; without one it reads all tokens again.
  rerun   The state derives from the steps taken. They are replayed from the last savepoint.

The last two are exact too; they cost the replayed steps. A `PendingReplay` is recorded before the
replay begins. From then on the session holds the tokens that are left; if the replay is
interrupted, the next call runs it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import torch

from engine.base.checks import found, is_integer
from engine.base.errors import SettingError
from engine.base.interrupts import complete
from engine.base.newest_tokens import NewestTokens
from engine.forward.decode import Decoder
from engine.forward.prefill import run_chunk
from engine.plan.needs import Needs
from engine.plan.prefill_time import Eta, PrefillFlops, Progress
from engine.runner.history import PendingReplay, Savepoint, reopened
from engine.runner.passes.passes import run_behind
from engine.runner.prefill import read
from engine.runner.prompt import chunk_again, ended, have_queries
from engine.runner.ranks.led import led
from engine.runner.recurrent.catch_up import behind, catch_up
from engine.runner.rollback import exclusive, rewound_on_error
from engine.runner.state import SessionState
from engine.runner.step import step
from engine.runner.step_runner import StepRunner


@led
def cut(session: SessionState, n: int, later: bool = False) -> None:
    """As Session.truncate."""
    session.require_open()
    if not is_integer(n) or not 0 <= n <= len(session.ids):
        raise SettingError(
            f"truncate: found {found(n)}, expected 0 to {len(session.ids)} (the session's tokens)"
        )
    with exclusive(session.loaded):
        if n < len(session.ids):
            _require_tokens(session, n, session.history.ends)
            session.stand_at(None)
            truncate(session, n)
        if not later:
            replay(session)


def truncate(session: SessionState, n: int) -> None:
    """Keep the session's first n tokens. `replay` runs the tokens that must run again."""
    history = session.history
    if session.runtime.needs.history != "bank":
        history.postpone(PendingReplay(_first(session, n), history.ends))
    elif _windows_lost(session, n):
        # rows that the next token would see have been overwritten: read all tokens again
        history.postpone(PendingReplay(_first(session, n), [Savepoint(0, n + 1)]))
    else:
        if session.bank.overwrites:
            history.postpone(None)
        complete(partial(_cut, session, n, history.savepoints))


def _first(session: SessionState, n: int) -> list[int] | NewestTokens:
    """The session's first n tokens: a copy."""
    ids = session.ids.copy()
    del ids[n:]
    return ids


def _windows_lost(session: SessionState, n: int) -> bool:
    """Return whether rows have been overwritten that n tokens would see."""
    if not session.bank.overwrites:
        return False
    return bool(n and (session.history.pending or not session.bank.holds(n)))


def _cut(session: SessionState, n: int, points: list[Savepoint]) -> None:
    """Truncate the session to n tokens, all of which are in the bank."""
    points, history = reopened(points, n), session.history
    session.rewind(n)
    session.runtime.truncate(n)
    cut = next((point for point in points if point.length > n), None)
    history.keep([point for point in points if point.length <= n])
    if cut is not None and cut.start < n:
        # the prompt ends here now
        history.add(ended(session, session.runner, cut.start, n, new=True))
        return
    latest = history.latest
    session.runtime.load(latest.state if latest else history.initial, n)
    if latest is not None and latest.length == n:
        session.stand_at(latest.logits)


def refresh_logits(session: SessionState, progress: Progress | None = None) -> None:
    """Recompute the logits of the session's newest token; the bank does not change."""
    n, history = len(session.committed), session.history
    latest = history.latest
    newest = latest if latest is not None and n == latest.length else None
    if session.runtime.needs.history != "bank" and not (newest and newest.switched):
        ends = history.savepoints
        if newest:
            # An interrupted prompt left no logits: it is read again to its end.
            ends = [*ends[:-1], replace(newest, length=n + 1)]
        _require_tokens(session, n, ends)
        ids = session.committed.copy()
        history.postpone(PendingReplay(ids, ends, open=history.prompt_is_open(n)))
        replay(session, progress)
        return
    with torch.inference_mode(), rewound_on_error(session):
        known = session.runner.logits_again(n)
        if known is not None:
            session.learn(known)
            return
        if n > history.prompt_length and session.runner.kind(n).own:
            session.learn(_step_again(session, n))
            return
        logits, _ = chunk_again(session, session.runner, n - 1, n, last_logits=True)
    assert logits is not None
    session.learn(logits[0])


def _step_again(session: SessionState, n: int) -> torch.Tensor:
    """Run the method's step of the newest of n tokens again: its logits. Rows do not change."""
    ring = session.query_ring
    have_queries(session, session.runner, session.runtime.needs.window)
    slots = ring.slots.clone()
    decoder = Decoder(session.runner.model, session.loaded.rotary, session.runtime, ring)
    try:
        session.runner.feed(session.committed[n - 1], n)
        with session.bank.replaying(n):
            return session.runner.run_with(decoder)
    finally:
        session.runtime.truncate(n - 1)  # it has looked at a row that is gone
        complete(lambda: ring.slots.copy_(slots))


def tokens_again(session: SessionState, n: int) -> int:
    """Return the number of tokens that are replayed if the session is truncated to n, or that its
    recurrent layers run over again.
    """
    needs = session.runtime.needs
    if session.bank.recurrent is not None:
        return n - _reach(session, n)
    if n == len(session.ids) and session.history.pending is None:
        return 0
    if needs.history == "bank":
        return n if _windows_lost(session, n) else 0
    kept, cut = _ends_at(session, n, session.history.ends)
    if cut is not None and cut.switched:
        return n if needs.every_query or rows_lost(session, needs, n) else 0
    return n - max((p.length for p in kept if _loadable(session, p)), default=0)


def _loadable(session: SessionState, point: Savepoint) -> bool:
    """Return whether the session can return to a savepoint without what came before it."""
    if not session.history.loadable(point) or not session.bank.holds(point.length):
        return False
    return point.state is None or session.runtime.loadable(point.state)


def rows_lost(session: SessionState, needs: Needs, n: int) -> bool:
    """Return whether sliding-window layers have overwritten rows that a method of such needs wants
    to take n tokens, which another has read, for its prompt: those that the newest queries saw, or
    all queries.
    """
    if not session.loaded.config.local_layers:
        return False
    return not session.bank.holds(min(n, 1) if needs.every_query else n)


def _reach(session: SessionState, n: int) -> int:
    """Return the greatest length up to n at which the recurrent layers' state is known."""
    state = session.bank.recurrent
    assert state is not None
    if state.holds(n):
        return n
    return max(session.history.states.reach(n), state.length if state.length <= n else 0)


def point_before(session: SessionState, n: int, total: int) -> int:
    """Return the greatest length <= n to which the session can be truncated without a replay, and
    from which a prompt up to `total` can be read. If the method has dropped rows, this is the end
    of a prompt or of a part of one.
    """
    if tokens_again(session, n) == 0:
        return n
    if session.bank.recurrent is not None:
        return _reach(session, n)
    least = session.runtime.needs.final_call or 0
    for point in reversed(session.history.ends):
        enough = not point.open or total - point.length >= least
        if point.length <= n and enough and tokens_again(session, point.length) == 0:
            return point.length
    return 0


def _ends_at(
    session: SessionState, n: int, ends: list[Savepoint]
) -> tuple[list[Savepoint], Savepoint | None]:
    """Return (savepoints valid at n tokens, the savepoint of the prompt that n cuts, or None)."""
    ends = reopened(ends, n)
    kept = [point for point in ends if point.length <= n]
    while (
        kept and kept[-1].open and 0 < n - kept[-1].length < (session.runtime.needs.final_call or 0)
    ):
        kept.pop()  # too little of this prompt is left for a call of its own
    cut = ends[len(kept)] if len(kept) < len(ends) else None
    return kept, cut if cut is not None and cut.start < n else None


def _require_tokens(session: SessionState, n: int, ends: list[Savepoint]) -> None:
    """Raise SettingError where the tokens that lead to a length n are gone: a stream keeps its
    newest, and few stores to replay them from.
    """
    ids = session.ids
    first = ids.first if isinstance(ids, NewestTokens) else 0
    if not n or not first:
        return
    loadable = [p.length for p in ends if _loadable(session, p) and p.length >= first]
    kept, _ = _ends_at(session, n, ends)
    if any(point.length in loadable for point in kept):
        return
    least = f"{min(loadable):,} to {len(ids):,}" if loadable else f"{len(ids):,}"
    raise SettingError(
        f"truncate: found {n:,}, expected {least}, or 0: this stream has forgotten the tokens "
        "before them; empty it, or make a new session"
    )


def replay(session: SessionState, progress: Progress | None = None) -> None:
    """Run the pending replay, if there is one: load the last savepoint, then decode the later
    tokens, or prefill them if they were part of a prompt.
    """
    history = session.history
    pending = history.pending
    if pending is None:
        if behind(session):
            with exclusive(session.loaded), rewound_on_error(session):
                catch_up(session, progress)
        return
    ids = pending.ids
    _require_tokens(session, len(ids), pending.ends)
    kept, cut = _ends_at(session, len(ids), pending.ends)
    history.postpone(replace(pending, inconsistent=False))  # an interrupted replay changes nothing
    session.made_consistent()
    session.take_time(wait=True)
    counters, began = replace(session.counters), time.perf_counter()
    try:
        with exclusive(session.loaded):
            lost = rows_lost(session, session.runtime.needs, len(ids))
            if cut is not None and cut.switched and not lost:
                _switch_again(session, ids, progress)
            else:
                _run_again(session, ids, kept, cut, progress, pending.open)
        history.postpone(None)
    finally:
        if history.pending is not None:
            session.learn(None)  # these logits are of a replayed token, not of the newest
        session.take_time(wait=True)
        # replayed tokens were counted when they first ran
        session.counters.roll_back(counters, time.perf_counter() - began)


def _run_again(
    session: SessionState,
    ids: list[int] | NewestTokens,
    kept: list[Savepoint],
    cut: Savepoint | None,
    progress: Progress | None,
    more: bool = False,
) -> None:
    n, history = len(ids), session.history
    known = max((i + 1 for i, point in enumerate(kept) if _loadable(session, point)), default=0)
    point = kept[known - 1] if known else Savepoint(0, 0, history.initial)
    later = [*kept[known:], *([replace(cut, length=n, open=more)] if cut is not None else [])]
    _load(session, point, kept[:known])
    for start, stop, open_ in _prompts(later):
        _step_to(session, ids, start, progress)
        read(session, list(ids[start:stop]), progress, open_)
    _step_to(session, ids, n, progress)
    if point.length == n:
        session.learn(point.logits)


def _prompts(points: list[Savepoint]) -> list[tuple[int, int, bool]]:
    """(start, stop, whether it goes on) of the prompts of these savepoints, the parts of each
    together.
    """
    found: list[tuple[int, int, bool]] = []
    for point in points:
        start = point.start
        if found and found[-1][2] and start in found[-1][:2]:
            start = found.pop()[0]
        found.append((start, point.length, point.open))
    return found


def _step_to(
    session: SessionState, ids: list[int] | NewestTokens, stop: int, progress: Progress | None
) -> None:
    """Decode the tokens up to position `stop` again."""
    first = len(session.committed)
    eta = _eta(session, session.runner, first, stop)
    for at in range(first, stop):
        began = time.perf_counter()
        step(session, ids[at])
        eta.add(at, at + 1, time.perf_counter() - began)
        if progress is not None:
            progress(eta.progress(at + 1))


def _switch_again(
    session: SessionState, ids: list[int] | NewestTokens, progress: Progress | None
) -> None:
    """Take the tokens for one prompt again, after a switch whose savepoint was truncated."""
    runner, n = session.runner, len(ids)

    def back() -> None:
        session.rewind(n)
        runner.runtime.load(session.history.initial, 0)

    complete(back)
    session.history.keep([_one_prompt(session, runner, None, progress)])


def _eta(session: SessionState, runner: StepRunner, start: int, stop: int) -> Eta:
    return Eta(
        partial(runner.runtime.prompt_flops, PrefillFlops.of(session.loaded.config)),
        start,
        stop,
    )


def _load(session: SessionState, point: Savepoint, kept: list[Savepoint]) -> None:
    """Load a savepoint into the session, and keep the savepoints `kept`."""
    session.history.keep(kept)
    session.rewind(point.length)
    with torch.inference_mode():
        session.runtime.load(point.state, point.length)
    session.learn(None)  # the steps that follow leave logits, or an interrupt none


def switched(
    session: SessionState, runner: StepRunner, progress: Progress | None = None
) -> list[Savepoint]:
    """Bring a new runner to the session's length, without changing the session. Returns the
    savepoints under the new runner.

    The same method (on another backend) copies its state. An evicting method takes all tokens so
    far for one prompt; if it sums attention, their queries run over the bank again.
    """
    before, runtime = session.runtime, runner.runtime
    n, way, same = len(session.committed), runtime.needs.history, before.method == runner.method
    if n == 0:
        return []
    if same:
        runtime.copy_from(before)
        return session.history.savepoints
    if way == "store":
        latest = session.history.latest
        logits = latest.logits if latest and latest.length == n else None
        return [_one_prompt(session, runner, logits, progress)]
    points = reopened(session.history.savepoints) or [Savepoint(0, n)]
    return [ended(session, runner, p.start, p.length, p.logits) for p in points]


def _one_prompt(
    session: SessionState,
    runner: StepRunner,
    logits: torch.Tensor | None,
    progress: Progress | None,
) -> Savepoint:
    """Take all tokens so far, which another method has read, for one prompt."""
    if runner.runtime.needs.every_query:
        _show_every_query(session, runner, progress)
    if runner.runtime.needs.again:
        run_behind(session, runner, progress)
    # one that forgets has no rows left to be cut again
    again = not runner.runtime.needs.forgets
    return ended(session, runner, 0, len(session.committed), logits, switched=again)


def _show_every_query(session: SessionState, runner: StepRunner, progress: Progress | None) -> None:
    """Run the queries of all tokens over the bank again; rows do not change."""
    runtime, model = runner.runtime, runner.model
    n, eta = len(session.committed), _eta(session, runner, 0, len(session.committed))
    runtime.begin_prompt(0, n)
    for first in range(0, n, session.planner.chunk):
        last, began = min(n, first + session.planner.chunk), time.perf_counter()
        tokens = torch.tensor(
            [session.committed[first:last]], dtype=torch.int64, device=model.device
        )
        where = (session.loaded.rotary, runtime, runner.bank, tokens, first, n)
        with torch.inference_mode():
            run_chunk(model, *where, write=False, pieces=runner.prompt_pieces)
        runtime.commit(last - first)
        eta.add(first, last, time.perf_counter() - began)
        if progress is not None:
            progress(eta.progress(last))
