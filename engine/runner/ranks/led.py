"""Calls that change a session, which all ranks of a model make in the same order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from engine.runner.state import SessionState

Call = TypeVar("Call", bound=Callable[..., Any])


def led(call: Call) -> Call:
    """A function of a session that every rank calls, rank 0 first: `Loaded.lead` tells the others.
    In a model of one process, and on ranks that follow, it is the function itself.
    """

    @functools.wraps(call)
    def lead(session: SessionState, *given: Any, **named: Any) -> Any:
        leading = session.loaded.lead
        if leading is None:
            return call(session, *given, **named)
        return leading.call(session, call, given, named)

    return cast(Call, lead)
