"""The end of a prompt: the method has tokens run again if it wants to, evicts or fixes its budget,
a savepoint is kept, and the ring has the queries that a selector needs.
"""

from __future__ import annotations

import torch

from engine.forward.prefill import run_chunk
from engine.runner.history import Savepoint
from engine.runner.passes.passes import Told, run_passes
from engine.runner.recurrent.catch_up import standing_at
from engine.runner.state import SessionState
from engine.runner.step_runner import StepRunner

WARM = 8  # queries at a prompt's end whose selections fill the working sets before the first step


def end_prompt(
    session: SessionState,
    start: int,
    logits: torch.Tensor | None,
    more: bool = False,
    told: Told | None = None,
) -> None:
    """End a prompt that began at `start`, with its last token's logits. more: it stays open. If a
    pass of the method's is interrupted, nothing has changed.
    """
    length = len(session.committed)
    if not more and session.runtime.needs.again:
        session.learn(logits)
        run_passes(session, session.runner, session.history.prompt_begin(start), told)
    session.keep_state(turn=True)
    with session.changing():
        session.history.add(ended(session, session.runner, start, length, logits, more, new=True))
    session.keep_queries()
    session.stand_at(logits)
    placement = session.bank.placement
    warms = placement is not None and placement.reuse and session.runtime.needs.fetches
    if warms and not more and length >= session.runner.dense_below:
        session.runtime.warm(session.runner.newest(length, WARM))


def close_latest(session: SessionState) -> None:
    """End the open prompt. The savepoint of its part stays, for a truncate that undoes the end."""
    part = session.history.savepoints[-1]
    if session.runtime.needs.again:
        run_passes(session, session.runner, session.history.prompt_begin(part.length))
    with session.changing():
        given = part.start, part.length, part.logits
        point = ended(session, session.runner, *given, new=True)
        session.history.add(point)
    session.keep_queries()


def ended(
    session: SessionState,
    runner: StepRunner,
    start: int,
    length: int,
    logits: torch.Tensor | None = None,
    more: bool = False,
    switched: bool = False,
    new: bool = False,
) -> Savepoint:
    """Return the savepoint of a prompt at positions start .. length-1, which ends under `runner`.
    more: the prompt stays open. switched: another method has read it. new: one more of the
    session's, which the oldest of its stores may make way for.
    """
    runtime, needs, ring = runner.runtime, runner.runtime.needs, session.query_ring
    with torch.inference_mode():
        if not more:
            have_queries(session, runner, needs.prompt_window)
            step = runner.at(length)
            if needs.ids:
                step.tokens = torch.tensor([session.committed[:length]], device=step.visible.device)
            runtime.end_prompt(length, step)
        own = needs.history != "bank" or needs.own_prompts
        # a short prompt's window holds queries of the answer before it
        if ring.high == length and (own or length - start < needs.window):
            ring.keep()
    if new and runtime.has_state():
        session.history.make_way(length)
    return Savepoint(start, length, runtime.savepoint(), logits, more, switched)


def restore_window(session: SessionState) -> None:
    """Recompute the queries of the next selection that the ring has lost (by a truncate of more
    tokens than the ring has).
    """
    have_queries(session, session.runner, session.runtime.needs.window)


def have_queries(session: SessionState, runner: StepRunner, window: int) -> None:
    """Fill the ring with the newest `window` queries: compute missing ones by full attention over
    the bank.
    """
    ring, n = session.query_ring, len(session.committed)
    first = max(0, n - window)
    if window == 0 or ring.covers(first, n):
        return
    stop = ring.low if ring.high == n and ring.low > first else n
    with standing_at(session, first, runner):
        _, newest = chunk_again(session, runner, first, stop)
    ring.write_chunk(newest, stop)
    ring.set_valid(first, n)


def chunk_again(
    session: SessionState, runner: StepRunner, first: int, stop: int, last_logits: bool = False
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Run tokens first .. stop-1 through the model with full attention, without writing rows."""
    model = runner.model
    tokens = torch.tensor([session.committed[first:stop]], dtype=torch.int64, device=model.device)
    return run_chunk(
        model,
        session.loaded.rotary,
        runner.dense_runtime,
        runner.bank,
        tokens,
        first,
        stop,
        write=False,
        last_logits=last_logits,
        pieces=runner.prompt_pieces,
        backend=runner.backend,
        advance=False,
    )
