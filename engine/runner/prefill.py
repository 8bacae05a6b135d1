"""Prefill of a session: chunk by chunk, each committed after it has run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from functools import partial

import torch

from engine.bank.pool.heap import give_back
from engine.bank.recurrent.savepoints import Savepoints
from engine.bank.row_origins import Span
from engine.forward.prefill import Outputs
from engine.methods.requirements import validate_parts
from engine.plan.prefill_time import Eta, PrefillFlops, Progress
from engine.runner.passes.passes import tell
from engine.runner.prompt import end_prompt
from engine.runner.ranks.led import led
from engine.runner.rollback import exclusive, reading, rewound_on_error
from engine.runner.state import SessionState


def read(
    session: SessionState,
    ids: list[int],
    progress: Progress | None = None,
    more: bool = False,
    every: Outputs | None = None,
) -> torch.Tensor | None:
    """Prefill validated ids; float32 logits [vocab] of the last one.

    progress: called after every chunk. more: the prompt is continued by the next call. every: takes
    the last layer's output of every chunk. Raises SettingError if the method cannot read a prompt
    in parts, or if the last part is too short.
    """
    runtime, history = session.runtime, session.history
    start, stop = len(session.committed), len(session.committed) + len(ids)
    session.method.validate_prompt(start, stop)
    goes_on = history.prompt_is_open(start)
    last = len(ids) if goes_on and not more else None
    validate_parts(session.method, runtime.needs, more or goes_on, last)
    runtime.begin_prompt(start, stop, more)
    if start:
        session.keep_state(turn=True)
    flops = partial(runtime.prompt_flops, PrefillFlops.of(session.loaded.config))
    passes = (0.0, 0.0)
    if not more:
        begin = history.prompt_begin(start)
        passes = runtime.passes_flops(PrefillFlops.of(session.loaded.config), begin, stop)
    eta = Eta(flops, start, stop, passes)
    with reading(session, start, stop):
        size = len(ids) if runtime.needs.one_chunk else session.planner.chunk
        for first, last in _chunks(session, start, stop, size):
            began = time.perf_counter()
            where = history.prompt_begin(start), first, last, math.inf if more else stop
            session.origins.add(first, session.method.prompt_origins(session.plan, *where))
            logits = _read_chunk(session, ids[first - start : last - start], first, stop, every)
            session.bank.keep_heap()
            seconds = time.perf_counter() - began
            eta.add(first, last, seconds)
            session.counters.count_prefill(last - first, seconds)
            if logits is not None:
                end_prompt(session, start, logits[0], more, partial(tell, eta, progress, stop))
                session.counters.count_prefill(0, time.perf_counter() - began - seconds)
            if progress is not None:
                progress(eta.progress(last))
    if session.runner.model.device.type == "cpu" and len(ids) > size:
        give_back()  # 40 ms, of seconds
    return session.last_logits


def _chunks(session: SessionState, start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """(first position, one past the last) of the chunks of at most `size` tokens, each as the
    method wants it when those before it have been read.
    """
    while start < stop:
        last = session.runtime.chunk_stop(start, min(stop, start + size))
        yield start, last
        start = last


def _told(session: SessionState, ids: list[int], every: Outputs | None) -> Outputs | None:
    """`every`, or what tells the method of these tokens too, where it asks (Needs.outputs)."""
    if not session.runtime.needs.outputs:
        return every
    model, runtime = session.runner.model, session.runtime

    def take(x: torch.Tensor, start: int) -> None:
        runtime.hear(ids, lambda first, stop: model.logits(x[0, first:stop]))
        if every is not None:
            every(x, start)

    return take


def _read_chunk(
    session: SessionState, ids: list[int], first: int, stop: int, every: Outputs | None
) -> torch.Tensor | None:
    """Run a chunk at positions from `first` on and commit it; logits [1, vocab] if it is the last
    of the prompt, which ends at `stop`.
    """
    runner, device = session.runner, session.runner.model.device
    tokens = torch.tensor([ids], dtype=torch.int64, device=device)
    logits, newest = runner.read(tokens, first, stop, _told(session, ids, every))
    count, length = min(newest.shape[2], len(ids)), first + len(ids)
    session.query_ring.reserve(length)
    session.query_ring.write_chunk(newest[:, :, -count:], length)
    session.commit(ids, count)
    # A chunk is seconds of work: its time must be true for the time left.
    runner.pace.ended(last=logits is not None)
    return logits


@led
def adopt(
    session: SessionState,
    ids: list[int],
    origins: Iterable[Span] = (),
    states: Savepoints | None = None,
) -> None:
    """Adopt validated ids whose rows are in the bank already. origins: of these rows; unknown if
    empty. states: of recurrent layers, as far as they are known.
    """
    with exclusive(session.loaded), rewound_on_error(session):
        session.take_over(ids, origins, states)
        end_prompt(session, 0, None)
