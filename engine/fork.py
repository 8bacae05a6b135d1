"""A copy of a session that goes its own way."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from engine.session import Session


def fork(session: Session) -> Session:
    """Copy a session's rows and state into a new one of the same capacity, backend and watch."""
    # not exclusive(): tensors that are made here are written to outside inference mode too
    with session.llm.busy():
        session.history.catch_up()
        copy = session.llm.session(session.method, session.capacity, session.offload)
        try:
            if copy.backend != session.backend:
                copy.set_backend(session.backend)
            with torch.inference_mode():
                copy.bank.copy_from(session.bank, len(session.committed))
            copy.committed = list(session.committed)
            copy.query_ring.copy_from(session.query_ring)
            logits = session.last_logits
            copy.last_logits = None if logits is None else logits.clone()
            copy.history.copy_from(session.history)
            copy.runtime.copy_from(session.runtime)
            copy.watch = None if session.watch is None else replace(session.watch)
        except BaseException:
            copy.close()
            raise
    return copy
