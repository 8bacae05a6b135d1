"""What an answer must look like: response_format, and a call that tool_choice demands."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.base.errors import SettingError
from engine.serve.errors import ApiError
from engine.serve.request.forced import forced
from engine.serve.request.prompts import Prompts
from engine.serve.request.tools import Tools, schema_of
from engine.serve.request.values import refuse
from engine.text.grammar import MISSING, Grammar

# the time to make a grammar grows with their square: 0.1 s of one core
MOST_NAMES = 2000
KINDS = ("text", "json_object", "json_schema")


def schema_asked(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The JSON schema that response_format demands; None where any text will do."""
    value = body.get("response_format")
    if value is None:
        return None
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in KINDS:
        raise refuse("response_format.type", kind, f"one of {', '.join(KINDS)}")
    if kind == "text":
        return None
    if body.get("ignore_eos"):
        raise refuse("ignore_eos", True, "false beside response_format")
    if kind == "json_object":
        return {"type": "object"}
    inner = value.get("json_schema")
    if not isinstance(inner, Mapping):
        raise refuse("response_format.json_schema", inner, "{'name': ..., 'schema': {...}}")
    return schema_of(inner.get("schema"), "response_format.json_schema.schema")


def grammar_of(body: Mapping[str, Any], tools: Tools | None, prompts: Prompts) -> Grammar | None:
    """The grammar of a request's answer. Runs beside the event loop. Raises ApiError that names
    the field.
    """
    schema = schema_asked(body)
    if schema is not None:
        if tools is not None:
            raise ApiError(
                400,
                "response_format: not supported together with tools",
                "response_format",
                "unsupported_parameter",
            )
        kind = body["response_format"]["type"]
        param = "response_format" + (".json_schema.schema" if kind == "json_schema" else "")
        return _made(prompts, param, schema)
    if tools is None or not tools.forced:
        return None
    assert prompts.form is not None
    for tool in tools.forced:
        if '"$ref"' in json.dumps(tool["function"]["parameters"]):
            raise ApiError(
                400,
                f"tool_choice: the parameters of {tool['function']['name']} hold a $ref, with "
                "which a call cannot be demanded",
                "tool_choice",
                "unsupported_parameter",
            )
    if body.get("ignore_eos"):
        raise refuse("ignore_eos", True, "false beside this tool_choice")
    parameters = {str(n): tool["function"]["parameters"] for n, tool in enumerate(tools.forced)}
    grammar = forced(prompts.form, tools, prompts.hidden)
    return _made(prompts, "tool_choice", parameters, grammar)


def names_in(schema: object) -> int:
    """How many names `required` and `properties` hold, in a schema and all within it."""
    count, waiting = 0, [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping):
            count += sum(
                len(part[name])
                for name in ("required", "properties")
                if isinstance(part.get(name), (Mapping, list))
            )
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return count


def _made(
    prompts: Prompts, param: str, schema: Mapping[str, Any], lark: str | None = None
) -> Grammar:
    found = names_in(schema)
    if found > MOST_NAMES:
        raise ApiError(
            400,
            f"{param}: found {found} names in required and properties, expected at most "
            f"{MOST_NAMES}",
            param,
            "invalid_value",
        )
    try:
        grammars = prompts.grammars
        return grammars.json(schema) if lark is None else grammars.lark(lark)
    except SettingError as error:
        code = "unsupported_parameter" if str(error) == MISSING else "invalid_value"
        raise ApiError(400, f"{param}: {error}", param, code) from None
