"""The grammar of a call that a request demands, in llguidance's form of Lark."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.serve.errors import ApiError
from engine.serve.request.calls import functions
from engine.serve.request.calls.scanner import CALLS, CLOSE, OPEN, Form
from engine.serve.request.calls.typed import kinds_of
from engine.serve.request.tools import Tools

# white space as templates write a call (Jinja's tojson), so that the next prompt holds it as it was
AS_TEMPLATES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
COMBINED = frozenset(
    "allOf anyOf oneOf not if $ref $dynamicRef patternProperties unevaluatedProperties".split()
)
# a parameter's free text, to the first end of one: a greedy text would take that too
TEXT = r"text[lazy]: /(?s:.*)\n<\/parameter>\n/"


def closed(schema: Any) -> Any:
    """A schema whose objects hold the properties that it names and no others, where it does not say
    and nothing is combined: a weak model that may add properties adds them without end.
    """
    if not isinstance(schema, Mapping) or COMBINED & schema.keys():
        return schema
    found = dict(schema)
    if isinstance(schema.get("properties"), Mapping) and schema["properties"]:
        found["properties"] = {name: closed(v) for name, v in schema["properties"].items()}
        found.setdefault("additionalProperties", False)
    if "items" in schema:
        found["items"] = closed(schema["items"])
    return found


def forced(form: Form, tools: Tools, hidden: Mapping[int, str]) -> str:
    """A grammar of exactly one call. hidden: as of CallScanner. Raises ApiError for parameters that
    this form cannot demand.
    """
    ids = {marker: token_id for token_id, marker in hidden.items()}

    def marker(text: str) -> str:
        return f"<[{ids[text]}]>" if text in ids else _literal(text)

    if form == "functions":
        rules, calls = [TEXT], []
        for tool in tools.forced:
            calls.append(_function(tool["function"], rules))
        start = f'start: {marker(OPEN)} "\\n" ({" | ".join(calls)}) {marker(CLOSE)}'
        return "\n".join([start, *rules]) + "\n"
    around = {
        "tags": f'{marker(OPEN)} "\\n" call "\\n" {marker(CLOSE)}',
        "list": f'{marker(CALLS)} "[" call "]"',
        "bare": "call",
    }
    arguments = "parameters" if form == "bare" else "arguments"
    calls_of = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                arguments: closed(tool["function"]["parameters"]),
            },
            "required": ["name", arguments],
            "additionalProperties": False,
        }
        for tool in tools.forced
    ]
    return f"start: {around[form]}\ncall: {_json({'anyOf': calls_of})}\n"


def _function(function: Mapping[str, Any], rules: list[str]) -> str:
    """A call of <function=...> with the parameters that its schema names, in their order, those not
    required perhaps. Adds the rules of their values.
    """
    schema, name = function["parameters"], function["name"]
    named, required = schema.get("properties", {}), schema.get("required", [])
    if COMBINED & schema.keys() or not isinstance(named, Mapping) or not isinstance(required, list):
        raise _cannot(name, "are combined of several schemas")
    parts = [_literal(f"{functions.FUNCTION}{name}>\n")]
    for key in [*named, *(key for key in required if key not in named)]:
        if not isinstance(key, str) or not functions.is_name(key):
            raise _cannot(name, "have a name that such a call cannot write")
        rule, begin = f"p{len(rules)}", _literal(f"{functions.PARAMETER}{key}>\n")
        rules.append(f"{rule}: {begin} {_value(named.get(key), schema)}")
        parts.append(rule if key in required else f"{rule}?")
    return " ".join([*parts, _literal(f"{functions.FUNCTION_END}\n")])


def _value(schema: Any, parameters: Mapping[str, Any]) -> str:
    """A value, to the end of its parameter."""
    end = _literal(f"\n{functions.PARAMETER_END}\n")
    if isinstance(schema, Mapping) and ("const" in schema or isinstance(schema.get("enum"), list)):
        listed = [schema["const"]] if "const" in schema else schema["enum"]
        spelled = [v if isinstance(v, str) else json.dumps(v, ensure_ascii=False) for v in listed]
        return f"({' | '.join(map(_literal, spelled))}) {end}"
    if "string" in kinds_of(schema, parameters):
        return "text"
    return f"{_json(closed(schema))} {end}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': AS_TEMPLATES})}"


def _cannot(name: str, why: str) -> ApiError:
    return ApiError(
        400,
        f"tool_choice: the parameters of {name} {why}, with which a call cannot be demanded",
        "tool_choice",
        "unsupported_parameter",
    )
