"""Extension of a session by tokens: validation, the pending replay, then prefill or decode."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.base.checks import callables, checked_ids
from engine.base.errors import SettingError
from engine.forward.prefill import Outputs
from engine.plan.prefill_time import Progress
from engine.runner.prefill import read
from engine.runner.ranks.led import led
from engine.runner.rewind import refresh_logits, replay
from engine.runner.rollback import exclusive
from engine.runner.state import SessionState
from engine.runner.step import step


@led
def prefill(
    session: SessionState,
    token_ids: Iterable[int],
    progress: Progress | None = None,
    more: bool = False,
    every: Outputs | None = None,
) -> torch.Tensor | None:
    """As Session.prefill."""
    session.require_open()
    callables(progress=progress, every=every)
    ids = checked_ids(token_ids, session.loaded.config.vocab_size)
    session.require_room(len(session.ids) + len(ids))
    replay(session, progress)
    return read(session, ids, progress, more, every)


@led
def decode(session: SessionState, token_id: int) -> torch.Tensor:
    """As Session.decode."""
    session.require_open()
    (token_id,) = checked_ids([token_id], session.loaded.config.vocab_size)
    session.require_room(len(session.ids) + 1)
    replay(session)
    return step(session, token_id)


@led
def caught_up(session: SessionState) -> None:
    """Read again what a truncate or a change of method has left to the next call."""
    with exclusive(session.loaded):
        replay(session)


@led
def with_logits(session: SessionState, progress: Progress | None = None) -> None:
    """As Session.refresh_logits."""
    session.require_open()
    callables(progress=progress)
    if not session.ids:
        raise SettingError(
            "generate: found an empty session and no tokens, expected a prompt of at least one "
            "token"
        )
    with exclusive(session.loaded):
        again = session.history.pending is not None
        replay(session, progress)
        if not again or session.last_logits is None:
            refresh_logits(session, progress)
