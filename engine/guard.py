"""How a session stays whole: one request at a time, and after any failure the tokens that were
committed before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from engine.device import typed_errors
from engine.errors import DeviceFailed

if TYPE_CHECKING:
    from engine.llm import LLM
    from engine.session import Session


@contextlib.contextmanager
def exclusive(llm: LLM) -> Iterator[None]:
    """Hold the LLM and its device, without autograd."""
    with llm.busy(), torch.inference_mode():
        yield


@contextlib.contextmanager
def rewound_on_error(session: Session) -> Iterator[None]:
    """On any exception (Ctrl-C, no host memory, a launch that fails) forget what the broken chunk
    or step has left: the bank's rows past the committed tokens, counts half-way in the scratch. A
    failure of the GPU becomes an error of the engine.
    """
    try:
        with typed_errors():
            yield
    except BaseException as error:
        if not session.closed:
            # a GPU that is lost refuses this too, and the first error says why
            lost = (RuntimeError,) if isinstance(error, DeviceFailed) else ()
            with contextlib.suppress(*lost):
                session.bank.rewind(len(session.ids), broken=True)
                session.runtime.setup.scratch.clear()
        raise
