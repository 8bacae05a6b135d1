"""POST /v1/responses: OpenAI's newer form of a request, brought into that of a chat.

What Codex CLI sends is accepted or refused by name. Accepted without effect, since nothing here
could follow it: reasoning.summary, text.verbosity, metadata, prompt_cache_key (prefixes are found
anyway), service_tier, user. Kinds of tools that only OpenAI runs are left out: the model cannot
call what it is not told of. Nothing is stored.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from engine.serve.errors import ApiError
from engine.serve.request.thoughts import FIELD
from engine.serve.request.values import refuse, text_of

SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "seed", "user")
# known, not supported: the values that ask for nothing
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "store": (False,),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
# how a chat names fields, and how this interface does
NAMES = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    ".function": "",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
INCLUDED = "reasoning.encrypted_content"
SEAL = "omnikv:"
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The request as that of chat/completions. Raises ApiError that names the field."""
    for name, neutral in NEUTRAL.items():
        if body.get(name) is not None and body[name] not in neutral:
            raise ApiError(
                400, f"{name}: not supported by this server", name, "unsupported_parameter"
            )
    include = body.get("include")
    if include is not None and (
        not isinstance(include, list) or set(map(str, include)) - {INCLUDED}
    ):
        raise refuse("include", include, f"nothing but {INCLUDED}")
    chat = {name: body[name] for name in SAME if body.get(name) is not None}
    if body.get("max_output_tokens") is not None:
        most = body["max_output_tokens"]
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise refuse("max_output_tokens", most, "an integer of at least 1")
        chat["max_tokens"] = most
    chat["messages"] = _messages(body)
    reasoning = body.get("reasoning")
    if reasoning is not None and not isinstance(reasoning, Mapping):
        raise refuse("reasoning", reasoning, "an object")
    if reasoning and reasoning.get("effort") is not None:
        chat["reasoning_effort"] = reasoning["effort"]
    return chat | _tools(body) | _format(body)


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """instructions and input as turns. Turns of one role after another become one, as templates
    want it.
    """
    found: list[dict[str, Any]] = []
    if body.get("instructions") is not None:
        found.append({"role": "system", "content": text_of(body["instructions"], "instructions")})
    items = body.get("input")
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not isinstance(items, list) or not items:
        raise refuse("input", items, "a string or a list of items")
    for number, item in enumerate(items):
        for turn in _turn(item, f"input[{number}]"):
            _append(found, turn)
    return found


def _append(found: list[dict[str, Any]], turn: dict[str, Any]) -> None:
    last: dict[str, Any] = found[-1] if found else {"role": None}
    if turn["role"] == "tool" or last["role"] != turn["role"]:
        found.append(turn)
        return
    between = "\n\n" if last["content"] and turn["content"] else ""
    last["content"] += between + turn["content"]
    if thought := turn.get(FIELD):
        last[FIELD] = f"{last[FIELD]}\n{thought}" if FIELD in last else thought
    if calls := turn.get("tool_calls"):
        last["tool_calls"] = last.get("tool_calls", []) + calls


def _turn(item: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(item, Mapping):
        raise refuse(where, item, "an object")
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise refuse(f"{where}.role", role, f"one of {', '.join(ROLES)}")
        return [{"role": ROLES[role], "content": _text(item.get("content"), f"{where}.content")}]
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        key = text_of(item.get("call_id"), f"{where}.call_id")
        call = {"id": key, "type": "function", "function": function}
        return [{"role": "assistant", "content": "", "tool_calls": [call]}]
    if kind == "function_call_output":
        key = text_of(item.get("call_id"), f"{where}.call_id")
        text = _text(item.get("output"), f"{where}.output")
        return [{"role": "tool", "tool_call_id": key, "content": text}]
    if kind == "reasoning":
        thought = _thought(item, where)
        return [{"role": "assistant", "content": "", FIELD: thought}] if thought else []
    raise refuse(f"{where}.type", kind, "message, function_call, function_call_output or reasoning")


def sealed(thought: str) -> str:
    """A thought as `encrypted_content`: what a client keeps and sends back unread. It is no secret
    of this server's.
    """
    return SEAL + base64.b64encode(thought.encode()).decode()


def _thought(item: Mapping[str, Any], where: str) -> str:
    """What this server's model thought: in the content, or sealed; "" for another's."""
    parts = item.get("content")
    if parts:
        if not isinstance(parts, list):
            raise refuse(f"{where}.content", parts, "a list of parts")
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
        return "".join(text_of(text, f"{where}.content") for text in texts)
    given = item.get("encrypted_content")
    if not isinstance(given, str) or not given.startswith(SEAL):
        return ""
    try:
        return base64.b64decode(given[len(SEAL) :], validate=True).decode()
    except ValueError:
        raise refuse(f"{where}.encrypted_content", given, "it as it was returned") from None


def _text(value: object, where: str) -> str:
    if not isinstance(value, list):
        return text_of(value, where)
    found = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("input_text", "output_text", "text"):
            raise refuse(f"{where}[{number}].type", kind, "input_text or output_text")
        found.append(text_of(part.get("text"), f"{where}[{number}].text"))
    return "".join(found)


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    tools, choice = body.get("tools"), body.get("tool_choice")
    found: dict[str, Any] = {}
    if tools is not None:
        if not isinstance(tools, list):
            raise refuse("tools", tools, "a list of tools")
        for number, tool in enumerate(tools):
            if not isinstance(tool, Mapping) or not isinstance(tool.get("type"), str):
                raise refuse(f"tools[{number}]", tool, "an object with a type")
        functions = [tool for tool in tools if tool["type"] == "function"]
        fields = ("name", "description", "parameters", "strict")
        found["tools"] = [
            {"type": "function", "function": {name: tool.get(name) for name in fields}}
            for tool in functions
        ]
    if choice is not None:
        found["tool_choice"] = choice
        if isinstance(choice, Mapping) and choice.get("type") == "function":
            name = {"name": choice.get("name")}
            found["tool_choice"] = {"type": "function", "function": name}
    return found


def _format(body: Mapping[str, Any]) -> dict[str, Any]:
    """text.format as response_format."""
    text = body.get("text")
    if text is not None and not isinstance(text, Mapping):
        raise refuse("text", text, "an object")
    wanted = text.get("format") if text else None
    if wanted is None:
        return {}
    if isinstance(wanted, Mapping) and wanted.get("type") == "json_schema":
        inner = {"name": wanted.get("name"), "schema": wanted.get("schema")}
        return {"response_format": {"type": "json_schema", "json_schema": inner}}
    return {"response_format": wanted}
