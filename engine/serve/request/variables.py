"""What a request tells the chat template beside its messages: chat_template_kwargs, and the efforts
of reasoning that interfaces name otherwise.

A name must be one that the template reads, so that nothing is silently without effect, and a value
one of JSON's scalars. Control tokens that a value spells are text, as in a message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine.base.checks import is_integer, is_number
from engine.serve.errors import ApiError
from engine.serve.request.values import refuse, text_of
from engine.text.sandbox.template import ChatTemplate

NAME = "chat_template_kwargs"
MOST = 16  # variables of a request
LONGEST = 256  # characters of a value
EFFORT, SWITCH = "reasoning_effort", "enable_thinking"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def variables_of(body: Mapping[str, Any], template: ChatTemplate | None) -> dict[str, Any]:
    """The template's variables of a request. `reasoning_effort` beside them is one too where the
    template reads it, and its "none" turns `enable_thinking` off where it reads that; elsewhere an
    effort has no effect. Raises ApiError that names the field.
    """
    reads = template.names if template else frozenset[str]()
    effort, found = body.get(EFFORT), dict[str, Any]()
    if effort is not None and effort not in EFFORTS:
        raise refuse(EFFORT, effort, f"one of {', '.join(EFFORTS)}")
    if effort == "none" and SWITCH in reads:
        found[SWITCH] = False
    elif effort is not None and EFFORT in reads:
        found[EFFORT] = effort
    given = body.get(NAME)
    if given is None:
        return found
    if not isinstance(given, Mapping) or len(given) > MOST:
        raise refuse(NAME, given, f"an object of at most {MOST} values")
    for name, value in given.items():
        if name not in reads:
            shown = name if name.isidentifier() and len(name) <= 60 else "a name of another form"
            raise ApiError(
                400,
                f"{NAME}: found {shown}, which this model's chat template does not read",
                NAME,
                "unsupported_parameter",
            )
        found[name] = _scalar(value, f"{NAME}.{name}")
    return found


def _scalar(value: Any, param: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str) and len(text_of(value, param)) <= LONGEST:
        return value
    if is_number(value) and (is_integer(value) or math.isfinite(value)) and abs(value) <= 2**53:
        return value
    expected = f"true, false, null, a number, or a string of at most {LONGEST} characters"
    raise refuse(param, value, expected)
