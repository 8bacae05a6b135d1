"""response_format, tool_choice and logit_bias through the official client.

Stops: an answer that is no JSON of its schema, a format that is ignored, one answer's state in the
next, a missing extra that is a crash, a bias that does nothing.
"""

import json
import sys
import threading
import types

import openai
import pytest

from engine.serve.request.forced import closed
from tests.engine.serve.scripted import templated
from tests.engine.serve.test_tools import TOOLS

pytest.importorskip("llguidance")

ASKED = [{"role": "user", "content": "Open the red door"}]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["one", "two"]}, "yes": {"type": "boolean"}},
    "required": ["kind", "yes"],
    "additionalProperties": False,
}


def ask(server, **settings):
    settings = {"model": "pocket", "messages": ASKED, "max_tokens": 200, "seed": 1} | settings
    return server.openai.chat.completions.create(**settings)


def schema(value):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value, "strict": True}}


def test_answers_follow_their_schema_also_streamed_and_several_at_once(server):
    reply = ask(server, n=3, temperature=1, response_format=schema(SCHEMA))
    for choice in reply.choices:
        found = json.loads(choice.message.content)
        assert found["kind"] in ("one", "two") and isinstance(found["yes"], bool)
        assert choice.finish_reason == "stop"
    chunks = ask(server, stream=True, response_format=schema(SCHEMA))
    assert json.loads("".join(c.choices[0].delta.content or "" for c in chunks))
    assert ask(server, max_tokens=3).choices[0].message.content[:1] != "{"
    text = ask(server, max_tokens=4, response_format={"type": "json_object"})
    assert text.choices[0].message.content.startswith("{")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "b"}}])
def test_a_call_that_is_demanded_comes(server, choice):
    """The shipped model knows nothing of tools: the grammar makes the call."""
    arguments = {**SCHEMA, "properties": {**SCHEMA["properties"], "kind": {"const": "z"}}}
    tool = {"type": "function", "function": {"name": "b", "parameters": arguments}}
    with templated(server.service.llm):
        choice = ask(server, tools=[*TOOLS, tool], tool_choice=choice, temperature=1).choices[0]
    assert choice.finish_reason in ("tool_calls", "length")
    if choice.finish_reason == "tool_calls":
        (call,) = choice.message.tool_calls
        assert call.function.name in ("look_up", "b") and not choice.message.content
        if call.function.name == "b":
            assert json.loads(call.function.arguments)["kind"] == "z"
    else:
        assert choice.message.content.startswith("<tool_call>\n{")


def test_a_bias_bans_and_promotes(server):
    plain = ask(server, temperature=0, max_tokens=4, logprobs=True)
    first = plain.choices[0].logprobs.content[0].token
    tokenizer = server.service.llm.tokenizer.backend
    token = ask(server, temperature=0, max_tokens=1, logprobs=True, top_logprobs=2)
    ids = tokenizer.encode(first, add_special_tokens=False).ids
    banned = ask(
        server, temperature=0, max_tokens=1, logprobs=True, logit_bias={str(i): -100 for i in ids}
    )
    assert token.choices[0].logprobs.content[0].token == first
    assert banned.choices[0].logprobs.content[0].token != first
    door = tokenizer.encode("door", add_special_tokens=False).ids[0]
    forced = ask(server, temperature=0, max_tokens=2, logit_bias={str(door): 100})
    assert forced.choices[0].message.content == tokenizer.decode([door, door]).lstrip()
    short = server.post("/v1/completions", {"prompt": "a", "logit_bias": {"4": -100}})
    assert short.status_code == 200


@pytest.mark.parametrize(
    "settings, param",
    [
        ({"response_format": 5}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": schema(5)}, "response_format.json_schema.schema"),
        ({"response_format": schema({"type": "odd"})}, "response_format.json_schema.schema"),
        (
            {"response_format": schema({"$ref": "http://127.0.0.1:1/x"})},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": schema({"description": "x" * 70_000})},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": schema({"type": "integer", "minimum": 10**4000})},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": schema({"required": [f"p{i}" for i in range(5000)]})},
            "response_format.json_schema.schema",
        ),
        ({"response_format": schema(SCHEMA), "ignore_eos": True}, "ignore_eos"),
        ({"logit_bias": {"5120": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logit_bias": [[1]]}, "logit_bias"),
    ],
)
def test_bad_formats_are_refused_by_name(server, settings, param):
    reply = server.post("/v1/chat/completions", {"messages": ASKED, "max_tokens": 1, **settings})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_a_number_that_no_double_holds_is_refused_in_a_schema(server):
    body = {"messages": ASKED, "response_format": schema({"type": "number", "maximum": 0})}
    content = json.dumps(body).replace('"maximum": 0', '"maximum": 1e999')
    headers = {"Content-Type": "application/json"}
    reply = server.http.post("/v1/chat/completions", content=content, headers=headers)
    assert reply.status_code == 400 and "schema" in reply.json()["error"]["param"], reply.text


def test_too_many_names_are_refused_with_the_numbers(server):
    """The time for a grammar grows with their square; those of nested objects count too."""
    inner = {"type": "object", "properties": {f"q{i}": {} for i in range(1500)}}
    value = {"properties": {"a": inner}, "required": [f"p{i}" for i in range(1000)]}
    body = {"messages": ASKED, "response_format": schema(value)}
    message = server.post("/v1/chat/completions", body).json()["error"]["message"]
    assert "found 2501 names" in message and "at most 2000" in message
    tools = [{"type": "function", "function": {"name": name, "parameters": value}} for name in "ab"]
    with templated(server.service.llm):
        body = {"messages": ASKED, "tools": tools, "tool_choice": "required"}
        reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 400 and "found 5002 names" in reply.json()["error"]["message"]


def test_the_models_thread_makes_no_grammar(server, monkeypatch):
    """It would stop everybody's tokens for as long as that takes, once for each choice."""
    library, made = server.service.prompts.grammars.library, []

    class Noting:
        def __getattr__(self, name):
            return getattr(library.LLMatcher, name)

        def __call__(self, *arguments, **settings):
            made.append(threading.current_thread().name)
            return library.LLMatcher(*arguments, **settings)

    fake = types.SimpleNamespace(LLMatcher=Noting())
    monkeypatch.setattr(server.service.prompts.grammars, "library", fake)
    reply = ask(server, n=3, temperature=1, response_format=schema(SCHEMA))
    assert all(json.loads(choice.message.content) for choice in reply.choices)
    assert len(made) == 1 and "texts" in made[0], made


def test_without_the_extra_one_line_names_it(server, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    monkeypatch.setattr(server.service.prompts, "_grammars", None)
    with pytest.raises(openai.BadRequestError, match="pip install llguidance"):
        ask(server, response_format={"type": "json_object"})


def test_a_demanded_calls_objects_are_closed_where_the_schema_does_not_say():
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {
        "type": "object",
        "properties": {
            "a": inner,
            "list": {"type": "array", "items": inner},
            "said": {**inner, "additionalProperties": True},
            "either": {"anyOf": [inner, {"type": "null"}]},
            "free": {"type": "object"},
        },
    }
    shut = {**inner, "additionalProperties": False}
    kept = schema["properties"]
    found = closed(schema)
    assert found["additionalProperties"] is False and "additionalProperties" not in schema
    assert found["properties"] == {
        **kept,
        "a": shut,
        "list": {"type": "array", "items": shut},
    }
    for odd in (True, [], {"properties": 3}, {"items": [inner]}, {"properties": {}}):
        assert closed(odd) == odd
