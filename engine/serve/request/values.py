"""Single values of a request: a text, a content, and the error of a field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.base.errors import EngineError
from engine.serve.errors import ApiError
from engine.text.boundary import valid


def refuse(param: str, found: object, expected: str) -> ApiError:
    """The error of a field."""
    shown = repr(found)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return ApiError(400, f"{param}: found {shown}, expected {expected}", param, "invalid_value")


def text_of(value: object, param: str) -> str:
    """A string that is Unicode."""
    if not isinstance(value, str):
        raise refuse(param, value, "a string")
    try:
        return valid(value, param)
    except EngineError as error:
        raise ApiError(400, str(error), param, "invalid_value") from None


def content_of(message: Mapping[str, Any], where: str) -> str:
    """The text of a content that is a string or a list of text parts."""
    content, param = message.get("content"), f"{where}.content"
    if not isinstance(content, list):
        return text_of(content, param)
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text"):
            raise refuse(param, kind, "parts of type text")
        parts.append(text_of(part.get("text"), param))
    return "".join(parts)
