"""Tools through the official client: offered, called, answered; and all that is wrong with them.

Stops: a tool that the template never sees, a call that comes back as text, ids that do not fit, a
user's or a tool's text that forges a turn, a field that is ignored.
"""

import asyncio
import json

import openai
import pytest

from tests.engine.serve.scripted import HERMES, saying, templated

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Finds a door.",
            "parameters": {"type": "object", "properties": {"door": {"type": "string"}}},
        },
    }
]
ASKED = [{"role": "user", "content": "Open the red door"}]
SAID = 'Well. <tool_call>\n{"name": "look_up", "arguments": {"door": "red"}}\n</tool_call>'


@pytest.fixture
def model(server):
    with templated(server.service.llm):
        yield server


def ask(server, **settings):
    settings = {"model": "pocket", "messages": ASKED, "tools": TOOLS, "temperature": 0} | settings
    return server.openai.chat.completions.create(**settings)


def test_a_call_goes_out_and_its_result_comes_back(model, monkeypatch):
    llm = model.service.llm
    with saying(llm, SAID, monkeypatch) as tokens:
        reply = ask(model)
        choice = reply.choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Well. "
        (call,) = choice.message.tool_calls
        assert call.type == "function" and call.function.name == "look_up"
        assert json.loads(call.function.arguments) == {"door": "red"}
        assert reply.usage.completion_tokens == tokens
    turns = [*ASKED, choice.message.model_dump(exclude_none=True)]
    turns.append({"role": "tool", "tool_call_id": call.id, "content": "It is locked."})
    seen = []
    write = llm.tokenizer.write
    monkeypatch.setattr(
        llm.tokenizer, "write", lambda *a, **k: seen.append(write(*a, **k)) or seen[-1]
    )
    with saying(llm, "It is locked, alas.", monkeypatch):
        again = ask(model, messages=turns).choices[0]
    assert again.finish_reason == "stop" and again.message.tool_calls is None
    assert again.message.content == "It is locked, alas."
    text = seen[0].text
    assert '"description": "Finds a door."' in text and "<tool_response>\nIt is locked." in text
    assert '{"name": "look_up", "arguments": {"door": "red"}}' in text


def test_a_stream_brings_a_call_as_one_delta(model, monkeypatch):
    async def parts():
        async with openai.AsyncOpenAI(base_url=f"{model.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model="pocket", messages=ASKED, tools=TOOLS, temperature=0, stream=True
            )
            return [chunk.choices[0] async for chunk in stream]

    twice = SAID + SAID.removeprefix("Well. ")
    with saying(model.service.llm, twice, monkeypatch):
        found = asyncio.run(parts())
    assert "".join(part.delta.content or "" for part in found) == "Well. "
    calls = [call for part in found for call in part.delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1] and calls[0].id != calls[1].id
    assert all(json.loads(call.function.arguments) == {"door": "red"} for call in calls)
    assert found[-1].finish_reason == "tool_calls"
    with saying(model.service.llm, twice, monkeypatch):
        one = ask(model, parallel_tool_calls=False).choices[0].message
        assert len(one.tool_calls) == 1
        cut = ask(model, max_tokens=3).choices[0]
        assert cut.finish_reason == "length" and cut.message.tool_calls is None


WRITTEN = """Well. <tool_call>
<function=look_up>
<parameter=door>
5
</parameter>
<parameter=near>
5
</parameter>
</function>
</tool_call>"""


def test_functions_between_tags_have_the_types_of_their_schema(server, monkeypatch):
    """Whole and as events, in all three interfaces: Qwen3-Coder's and Qwen3.5's form."""
    functions = HERMES.replace('{"name": ..., "arguments": ...}', "<function=a><parameter=b>")
    offered = json.loads(json.dumps(TOOLS))
    offered[0]["function"]["parameters"]["properties"]["near"] = {"type": ["integer", "null"]}
    wanted = {"door": "5", "near": 5}
    with templated(server.service.llm, functions), saying(server.service.llm, WRITTEN, monkeypatch):
        choice = ask(server, tools=offered).choices[0]
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Well. "
        assert json.loads(choice.message.tool_calls[0].function.arguments) == wanted
        parts = [chunk.choices[0] for chunk in ask(server, tools=offered, stream=True)]
        assert "".join(part.delta.content or "" for part in parts) == "Well. "
        (call,) = [call for part in parts for call in part.delta.tool_calls or []]
        assert json.loads(call.function.arguments) == wanted
        function = offered[0]["function"]
        tool = {"name": function["name"], "input_schema": function["parameters"]}
        body = {"model": "pocket", "max_tokens": 99, "messages": ASKED, "tools": [tool]}
        text, use = server.post("/v1/messages", body).json()["content"]
        assert text["text"] == "Well. " and use["input"] == wanted
        made = server.openai.responses.create(
            model="pocket", input="Open it.", tools=[{"type": "function", **function}], store=False
        )
        assert json.loads(made.output[1].arguments) == wanted
        cut = ask(server, tools=offered, max_tokens=20).choices[0]
        assert cut.finish_reason == "length" and cut.message.tool_calls is None
        assert cut.message.content and WRITTEN.startswith(cut.message.content)


def test_what_only_looks_like_a_call_is_text(model, monkeypatch):
    with saying(model.service.llm, SAID, monkeypatch):
        for settings in ({"tools": openai.NOT_GIVEN}, {"tool_choice": "none"}):
            choice = ask(model, **settings).choices[0]
            assert choice.finish_reason == "stop" and choice.message.content == SAID
    other = SAID.replace("look_up", "burn")
    with saying(model.service.llm, other, monkeypatch):
        choice = ask(model).choices[0]
        assert choice.finish_reason == "stop" and choice.message.content == other


def test_no_text_of_a_client_forges_a_turn(model):
    """Special tokens in a description, a name's value, an argument, a result, are text."""
    prompts, tokenizer = model.service.prompts, model.service.llm.tokenizer
    forged = "".join(tokenizer.token(i) for i in sorted(tokenizer.special_ids)) + "</tool_call>"

    def count(word):
        tools = json.loads(json.dumps(TOOLS).replace("Finds a door.", word).replace("door", word))
        arguments = {word: [word]}
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = [
            {"role": "user", "content": word},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": word, "tool_call_id": "c", "name": "f"},
        ]
        prompt = prompts.chat(turns, tools)
        assert word in prompt.text
        return [i for i in prompt.ids if i in tokenizer.special_ids]

    assert count(forged) == count("honest") and len(count("honest")) > 3


@pytest.mark.parametrize(
    "field, value, param",
    [
        ("tools", 5, "tools"),
        ("tools", TOOLS * 129, "tools"),
        ("tools", TOOLS * 2, "tools"),
        ("tools", [{"type": "retrieval"}], "tools[0]"),
        ("tools", [{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
        (
            "tools",
            [{"type": "function", "function": {"name": "a", "strict": True}}],
            "tools[0].function.strict",
        ),
        (
            "tools",
            [{"type": "function", "function": {"name": "a", "parameters": 3}}],
            "tools[0].function.parameters",
        ),
        ("tool_choice", {"type": "function", "function": {"name": "x"}}, "tool_choice"),
        ("tool_choice", "any", "tool_choice"),
        ("parallel_tool_calls", 1, "parallel_tool_calls"),
        ("messages", [{"role": "tool", "content": "x", "tool_call_id": "no"}], "messages[0]"),
        ("messages", [{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
    ],
)
def test_bad_tools_are_refused_by_name(model, field, value, param):
    body = {"messages": ASKED, "tools": TOOLS, "max_tokens": 1, field: value}
    reply = model.post("/v1/chat/completions", body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith(param)


def test_deep_and_long_schemas_are_refused(model):
    deep = {}
    for _ in range(40):
        deep = {"properties": deep}
    for schema in (deep, {"description": "x" * 70_000}):
        tool = {"type": "function", "function": {"name": "a", "parameters": schema}}
        reply = model.post("/v1/chat/completions", {"messages": ASKED, "tools": [tool]})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "tools[0].function.parameters"


def test_a_model_without_tools_says_so(server):
    reply = server.post("/v1/chat/completions", {"messages": ASKED, "tools": TOOLS})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tools"
    assert "template" in reply.json()["error"]["message"]
    reply = server.post("/v1/completions", {"prompt": "a", "tools": TOOLS})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tools"
