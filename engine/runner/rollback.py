"""Transactions of a session: one request at a time, and rollback to the committed tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch

from engine.base.device import typed_errors
from engine.base.errors import DeviceFailed
from engine.base.interrupts import complete
from engine.load.loaded import Loaded
from engine.runner.prompt import end_prompt
from engine.runner.state import SessionState


@contextlib.contextmanager
def exclusive(loaded: Loaded) -> Iterator[None]:
    """Hold the model and its device, without autograd."""
    with loaded.busy(), torch.inference_mode():
        yield


@contextlib.contextmanager
def rewound_on_error(session: SessionState) -> Iterator[None]:
    """Roll the session back on any exception (Ctrl-C, no host memory, a launch that fails). The
    aborted chunk or step may have left rows past the committed tokens, partial counts in the
    scratch, and a half-committed state. A failure of the GPU becomes an error of the engine.
    """
    try:
        with typed_errors():
            yield
    except BaseException as error:
        if not session.closed:
            # a GPU that is lost refuses this too, and the first error says why
            lost = (RuntimeError,) if isinstance(error, DeviceFailed) else ()
            with contextlib.suppress(*lost):
                complete(partial(roll_back, session))
        raise


@contextlib.contextmanager
def reading(session: SessionState, start: int, stop: int) -> Iterator[None]:
    """Read a prompt at positions start .. stop-1, while its host memory is allocated. If
    interrupted, the prompt ends after its last committed chunk.
    """
    with exclusive(session.loaded):
        try:
            with rewound_on_error(session), session.bank.preparing(stop):
                yield
        except BaseException:
            if not session.closed:
                complete(partial(end_early, session, start))
            raise


def roll_back(session: SessionState) -> None:
    """Undo an aborted chunk or step: return to the committed tokens."""
    n = len(session.committed)
    session.bank.rewind(n, broken=True)
    session.query_ring.truncate(n)
    session.runtime.clear_scratch()
    session.forget_selection()
    if session.inconsistent:
        invalidate(session, n)


def end_early(session: SessionState, start: int) -> None:
    """End an interrupted prompt after its last committed chunk. start: its first position. A method
    that would run it again leaves it open: the next call goes on with it, or ends it.
    """
    if session.inconsistent:
        invalidate(session, start)
    elif len(session.committed) > max(start, session.history.prompt_length):
        again = session.runtime.needs.again > 0
        end_prompt(session, start, session.last_logits if again else None, more=again)


def invalidate(session: SessionState, start: int) -> None:
    """The runtime was interrupted inside a commit. If its state derives from the bank, nothing is
    lost; otherwise mark it for rebuilding before the next step. start: first position of the prompt
    being read, else the session's length.
    """
    if session.runtime.needs.history == "bank":
        session.made_consistent()
        end_early(session, start)
    else:
        session.history.invalidate(session.committed, start)
