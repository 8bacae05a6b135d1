"""The tools of a request, and the turns in which they were called: checked, and brought into the
form that chat templates take.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.serve.errors import ApiError
from engine.serve.request.thoughts import FIELD
from engine.serve.request.values import content_of, refuse, text_of

MOST_TOOLS = 128
MOST_CALLS = 128  # in one message
LONGEST_SCHEMA = 64 << 10  # characters of JSON
LONGEST_TOOLS = 1 << 20  # characters of all of a request's tools
DEEPEST = 32  # objects and lists inside one another
NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
CHOICES = ("none", "auto", "required")
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
MOST_MESSAGES = 4096


@dataclass(frozen=True)
class Tools:
    """What a model may call. offered: as chat templates take them. choice: none, auto, required, or
    the name of the one that must be called. parallel: whether several calls may come at once.
    """

    offered: tuple[dict[str, Any], ...]
    choice: str = "auto"
    parallel: bool = True

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """{name that can be called: the schema of its parameters}."""
        called = [tool["function"] for tool in self.offered]
        return {function["name"]: function["parameters"] for function in called}

    @property
    def forced(self) -> list[dict[str, Any]]:
        """Of the tools, those of which one must be called; none where the model may choose."""
        if self.choice in ("none", "auto"):
            return []
        return [
            tool for tool in self.offered if self.choice in ("required", tool["function"]["name"])
        ]


def depth(value: Any, most: int) -> int:
    """How deep objects and lists stand inside one another; at most `most` + 1 is looked at."""
    level, waiting = 0, [value]
    while waiting and level <= most:
        inner = [v for v in waiting if isinstance(v, (dict, list))]
        waiting = [w for v in inner for w in (v.values() if isinstance(v, dict) else v)]
        level += bool(inner)
    return level


def schema_of(value: object, param: str) -> dict[str, Any]:
    """A JSON schema of bounded size and depth."""
    if not isinstance(value, dict):
        raise refuse(param, value, "a JSON schema")
    if depth(value, DEEPEST) > DEEPEST:
        raise ApiError(400, f"{param}: nested deeper than {DEEPEST}", param, "invalid_value")
    if len(json.dumps(value)) > LONGEST_SCHEMA:
        raise ApiError(
            400, f"{param}: longer than {LONGEST_SCHEMA} characters", param, "invalid_value"
        )
    return value


def tools_of(body: Mapping[str, Any]) -> Tools | None:
    """The fields tools, tool_choice and parallel_tool_calls; None without tools."""
    value = body.get("tools")
    listed = [] if value is None else value
    if not isinstance(listed, list) or len(listed) > MOST_TOOLS:
        raise refuse("tools", value, f"a list of at most {MOST_TOOLS} tools")
    offered = tuple(_tool(tool, f"tools[{number}]") for number, tool in enumerate(listed))
    if len(json.dumps(offered)) > LONGEST_TOOLS:
        raise ApiError(
            400, f"tools: longer than {LONGEST_TOOLS} characters", "tools", "invalid_value"
        )
    names = [tool["function"]["name"] for tool in offered]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools: two have one name", "tools", "invalid_value")
    parallel = body.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise refuse("parallel_tool_calls", parallel, "true or false")
    choice = _choice(body.get("tool_choice"), names)
    return Tools(offered, choice, parallel is not False) if offered else None


def _tool(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
        raise refuse(where, tool, "{'type': 'function', 'function': {...}}")
    if tool.get("type") != "function":
        raise refuse(f"{where}.type", tool.get("type"), "function")
    function = tool["function"]
    found: dict[str, Any] = {"name": name_of(function.get("name"), f"{where}.function.name")}
    if function.get("strict"):
        raise ApiError(
            400,
            f"{where}.function.strict: not supported by this server",
            f"{where}.function.strict",
            "unsupported_parameter",
        )
    about = function.get("description")
    found["description"] = "" if about is None else text_of(about, f"{where}.function.description")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    found["parameters"] = schema_of(parameters, f"{where}.function.parameters")
    return {"type": "function", "function": found}


def name_of(value: object, param: str) -> str:
    """A tool's name."""
    if not isinstance(value, str) or not NAME.fullmatch(value):
        raise refuse(param, value, "1 to 128 letters, digits and _.:-")
    return value


def _choice(value: object, names: list[str]) -> str:
    """none, auto, required, or a name."""
    if value is None:
        return "auto"
    if isinstance(value, str) and value in CHOICES:
        if value == "required" and not names:
            raise refuse("tool_choice", value, "tools to choose from")
        return value
    function = value.get("function") if isinstance(value, Mapping) else None
    if isinstance(function, Mapping) and value.get("type") == "function":  # type: ignore[attr-defined]
        name = function.get("name")
        if isinstance(name, str) and name in names:
            return name
        raise refuse("tool_choice", name, "the name of one of the tools")
    raise refuse("tool_choice", value, "none, auto, required, or the function to call")


# ---------------------------------------------------------------- turns


def messages_of(body: Mapping[str, Any], tools: bool) -> list[dict[str, Any]]:
    """The turns of a chat, contents joined to one text each. tools: whether the model's template
    can write calls and their results.
    """
    value = body.get("messages")
    if not isinstance(value, list) or not 1 <= len(value) <= MOST_MESSAGES:
        raise refuse("messages", value, f"a list of 1 to {MOST_MESSAGES} messages")
    found: list[dict[str, Any]] = []
    called: dict[str, str] = {}  # id -> name
    for number, message in enumerate(value):
        where = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise refuse(where, message, "an object with role and content")
        role = message.get("role")
        if not isinstance(role, str) or role not in (*ROLES, "tool"):
            raise refuse(f"{where}.role", role, f"one of {', '.join(ROLES)}, tool")
        calls = message.get("tool_calls")
        if (calls or role == "tool") and not tools:
            field = f"{where}.tool_calls" if calls else f"{where}.role"
            raise ApiError(400, f"{field}: {NO_TOOLS}", field, "unsupported_parameter")
        if role == "tool":
            found.append(_result(message, where, called))
        elif calls:
            if role != "assistant":
                raise refuse(f"{where}.tool_calls", role, "them in a message of the assistant")
            found.append(_calling(message, calls, where, called))
        else:
            thought = _thought(message, where) if role == "assistant" else {}
            given = {"content": ""} if thought and message.get("content") is None else message
            found.append({"role": ROLES[role], "content": content_of(given, where)} | thought)
    return found


def _thought(message: Mapping[str, Any], where: str) -> dict[str, str]:
    """What the assistant thought before a turn, as this server returned it; {} without."""
    value = message.get(FIELD)
    if value is None or value == "":
        return {}
    return {FIELD: text_of(value, f"{where}.{FIELD}")}


NO_TOOLS = "this model's chat template has no tools, or calls of a form that is not known here"


def _result(message: Mapping[str, Any], where: str, called: Mapping[str, str]) -> dict[str, Any]:
    """What a tool returned."""
    key = text_of(message.get("tool_call_id"), f"{where}.tool_call_id")
    if key not in called:
        raise refuse(f"{where}.tool_call_id", key, "the id of a call before it")
    content = content_of(message, where)
    return {"role": "tool", "content": content, "tool_call_id": key, "name": called[key]}


def _calling(
    message: Mapping[str, Any], calls: object, where: str, called: dict[str, str]
) -> dict[str, Any]:
    """A turn of the assistant that calls tools."""
    if not isinstance(calls, list) or len(calls) > MOST_CALLS:
        raise refuse(f"{where}.tool_calls", calls, f"a list of at most {MOST_CALLS} calls")
    written = []
    for number, call in enumerate(calls):
        here = f"{where}.tool_calls[{number}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise refuse(here, call, "{'id': ..., 'type': 'function', 'function': {...}}")
        key = text_of(call.get("id"), f"{here}.id")
        name = name_of(function.get("name"), f"{here}.function.name")
        arguments = arguments_of(function.get("arguments"), f"{here}.function.arguments")
        called[key] = name
        written.append(
            {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}
        )
    content = "" if message.get("content") is None else content_of(message, where)
    turn = {"role": "assistant", "content": content, "tool_calls": written}
    return turn | _thought(message, where)


def arguments_of(value: object, param: str) -> dict[str, Any]:
    """A call's arguments, which OpenAI writes as the JSON text of an object."""
    text = text_of(value, param)
    try:
        found = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or depth(found, DEEPEST) > DEEPEST:
        raise refuse(param, value, f"the JSON text of an object, nested at most {DEEPEST} deep")
    return found
