"""POST /v1/messages: Anthropic's form of a request, brought into that of a chat, and its errors.

What Claude Code sends is accepted or refused by name. Accepted without effect, since nothing here
could follow it: metadata, service_tier and cache_control (prefixes are found anyway).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.serve.errors import ApiError
from engine.serve.request.thoughts import FIELD
from engine.serve.request.values import refuse, text_of

ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
SAME = ("temperature", "top_p", "top_k", "stream", "model")
# how a chat names fields, and how this interface does
NAMES = {
    "stop": "stop_sequences",
    "reasoning_effort": "output_config.effort",
    ".function.parameters": ".input_schema",
    ".function": "",
}
NOT_HERE = ("container", "mcp_servers", "inference_geo")


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's form."""
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def chat_of(body: Mapping[str, Any], counting: bool = False) -> dict[str, Any]:
    """The request as that of chat/completions. counting: of count_tokens, which needs no
    max_tokens. Raises ApiError that names the field.
    """
    _known(body)
    chat = {name: body[name] for name in SAME if body.get(name) is not None}
    if not counting:
        most = body.get("max_tokens")
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            raise refuse("max_tokens", most, "an integer of at least 1")
        chat["max_tokens"] = most
    stops = body.get("stop_sequences")
    if stops is not None:
        if not isinstance(stops, list):
            raise refuse("stop_sequences", stops, "a list of strings")
        chat["stop"] = stops
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refuse("messages", messages, "a list of at least one message")
    found: list[dict[str, Any]] = []
    if body.get("system"):
        found.append({"role": "system", "content": _texts(body["system"], "system")})
    for number, message in enumerate(messages):
        for turn in _turns(message, f"messages[{number}]"):
            if found and turn["role"] == found[-1]["role"] == "user":
                found[-1]["content"] += "\n" + turn["content"]
            else:
                found.append(turn)
    if found[-1]["role"] == "assistant":
        raise ApiError(
            400,
            "messages: an answer that the client has begun is not supported by this server",
            "messages",
            "unsupported_parameter",
        )
    chat["messages"] = found
    return chat | _tools(body) | _effort(body)


def _effort(body: Mapping[str, Any]) -> dict[str, Any]:
    """thinking and output_config.effort, as a chat has them."""
    thinking, output = body.get("thinking"), body.get("output_config")
    for name, value in (("thinking", thinking), ("output_config", output)):
        if value is not None and not isinstance(value, Mapping):
            raise refuse(name, value, "an object")
    if thinking and thinking.get("type") == "disabled":
        return {"reasoning_effort": "none"}
    effort = output.get("effort") if output else None
    return {} if effort is None else {"reasoning_effort": effort}


def _known(body: Mapping[str, Any]) -> None:
    """Refuse what is known and not supported."""
    for name in NOT_HERE:
        if body.get(name):
            raise _unsupported(name)
    output = body.get("output_config")
    if isinstance(output, Mapping) and output.get("format") is not None:
        raise _unsupported("output_config.format")
    if body.get("output_format") is not None:
        raise _unsupported("output_format")
    edits = body.get("context_management")
    if edits is not None:
        listed = edits.get("edits") if isinstance(edits, Mapping) else None
        listed = [] if listed is None else listed if isinstance(listed, list) else [None]
        kinds = [e.get("type") if isinstance(e, Mapping) else None for e in listed]
        # the template decides which thoughts stay
        if not all(isinstance(k, str) and k.startswith("clear_thinking") for k in kinds):
            raise _unsupported("context_management")


def _unsupported(name: str) -> ApiError:
    return ApiError(400, f"{name}: not supported by this server", name, "unsupported_parameter")


def _texts(value: object, where: str) -> str:
    """A text, or a list of text blocks joined."""
    if isinstance(value, str):
        return text_of(value, where)
    if not isinstance(value, list):
        raise refuse(where, value, "a string or a list of text blocks")
    found = []
    for number, block in enumerate(value):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind != "text":
            raise refuse(f"{where}[{number}].type", kind, "text")
        found.append(text_of(block.get("text"), f"{where}[{number}].text"))
    return "\n".join(found)


def _turns(message: object, where: str) -> list[dict[str, Any]]:
    """A message as turns of a chat: results of tools are turns of their own. What a system says in
    the middle is the user's, as many templates take a system's turn at the beginning alone, and
    what was read before it stays as it is.
    """
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("user", "assistant", "system") or not isinstance(message, Mapping):
        raise refuse(f"{where}.role", role, "user, assistant or system")
    content = message.get("content")
    if role == "system":
        return [{"role": "user", "content": _texts(content, f"{where}.content")}]
    if isinstance(content, str):
        return [{"role": role, "content": text_of(content, f"{where}.content")}]
    if not isinstance(content, list):
        raise refuse(f"{where}.content", content, "a string or a list of blocks")
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for number, block in enumerate(content):
        here = f"{where}.content[{number}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "text":
            texts.append(text_of(block.get("text"), f"{here}.text"))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(text_of(block.get("thinking"), f"{here}.thinking"))
        elif kind == "redacted_thinking" and role == "assistant":
            continue  # another model's, which nobody here can read
        elif kind == "tool_use" and role == "assistant":
            calls.append(_call(block, here))
        elif kind == "tool_result" and role == "user":
            results.append(_result(block, here))
        else:
            kinds = "text, thinking or tool_use (assistant), tool_result (user)"
            raise refuse(f"{here}.type", kind, kinds)
    if role == "user":
        more = [{"role": "user", "content": "\n".join(texts)}] if texts or not results else []
        return results + more
    turn: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        turn[FIELD] = "\n".join(thoughts)
    return [turn | {"tool_calls": calls}] if calls else [turn]


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("input"), Mapping):
        raise refuse(f"{where}.input", block.get("input"), "an object")
    return {
        "id": text_of(block.get("id"), f"{where}.id"),
        "type": "function",
        "function": {
            "name": text_of(block.get("name"), f"{where}.name"),
            "arguments": json.dumps(block["input"], ensure_ascii=False),
        },
    }


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    content = block.get("content")
    text = "" if content is None else _texts(content, f"{where}.content")
    if block.get("is_error"):
        text = f"Error: {text}"
    key = text_of(block.get("tool_use_id"), f"{where}.tool_use_id")
    return {"role": "tool", "tool_call_id": key, "content": text}


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields tools and tool_choice."""
    tools, choice = body.get("tools"), body.get("tool_choice")
    found: dict[str, Any] = {}
    if tools is not None:
        if not isinstance(tools, list):
            raise refuse("tools", tools, "a list of tools")
        found["tools"] = [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    if choice is None:
        return found
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "tool":
        found["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in ("auto", "any", "none"):
        found["tool_choice"] = "required" if kind == "any" else kind
    else:
        raise refuse("tool_choice.type", kind, "auto, any, tool or none")
    if choice.get("disable_parallel_tool_use"):
        found["parallel_tool_calls"] = False
    return found


def _tool(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise refuse(where, tool, "an object with name and input_schema")
    if tool.get("type", "custom") not in ("custom", None):
        raise refuse(f"{where}.type", tool["type"], "custom: this server runs no tools itself")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function | {"strict": tool.get("strict")}}
