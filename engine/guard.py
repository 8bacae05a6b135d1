"""How a session stays whole: one request at a time, and after any failure the tokens that were
committed before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from engine.device import typed_errors
from engine.errors import DeviceFailed, SessionClosed
from engine.finish import finished

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.session import Session


class _Closed:
    """What a closed session holds instead of its bank, queries and runner."""

    def __getattr__(self, name: str) -> Any:
        raise SessionClosed(CLOSED_LINE)


CLOSED_LINE = "this session was closed; make a new one with llm.session()"
CLOSED: Any = _Closed()


@contextlib.contextmanager
def exclusive(llm: LLM) -> Iterator[None]:
    """Hold the LLM and its device, without autograd."""
    with llm.busy(), torch.inference_mode():
        yield


@contextlib.contextmanager
def rewound_on_error(session: Session) -> Iterator[None]:
    """On any exception (Ctrl-C, no host memory, a launch that fails) forget what the broken chunk
    or step has left: the bank's rows past the committed tokens, counts half-way in the scratch, a
    state that was half committed. A failure of the GPU becomes an error of the engine.
    """
    try:
        with typed_errors():
            yield
    except BaseException as error:
        if not session.closed:
            # a GPU that is lost refuses this too, and the first error says why
            lost = (RuntimeError,) if isinstance(error, DeviceFailed) else ()
            with contextlib.suppress(*lost):
                finished(partial(go_back, session))
        raise


@contextlib.contextmanager
def reading(session: Session, start: int, stop: int) -> Iterator[None]:
    """Read a prompt at positions start .. stop-1, while host memory for it is being taken. On
    interruption the prompt ends after its last whole chunk.
    """
    with exclusive(session.llm):
        try:
            with rewound_on_error(session), session.bank.preparing(stop):
                yield
        except BaseException:
            if not session.closed:
                finished(partial(end_early, session, start))
            raise


def go_back(session: Session) -> None:
    """Forget what a broken chunk or step has left."""
    n = len(session.committed)
    session.bank.rewind(n, broken=True)
    session.query_ring.truncate(n)
    session.runtime.setup.scratch.clear()
    session.selected = False
    if session.torn:
        distrust(session, n)


def end_early(session: Session, start: int) -> None:
    """End a prompt that began at `start` and was interrupted after its last whole chunk."""
    if session.torn:
        distrust(session, start)
    elif len(session.committed) > max(start, session.history.prompt_length):
        session.end_prompt(start, None)


def distrust(session: Session, start: int) -> None:
    """A runtime broke off between two states. One that follows from the bank is whole; another is
    made again by the next step. start: of a prompt under way, or the session's length.
    """
    if session.runtime.needs.history == "bank":
        session.torn = False
        end_early(session, start)
    else:
        session.history.distrust(start)
