"""POST /v1/messages: the first requests of Claude Code, in Anthropic's form, whole and as events.

Stops: events that a client cannot join, usage that does not add up, a stop sequence that is not
named, a tool's result that the model never sees, a field that is ignored, errors in another form.
"""

import json

import pytest

from engine.serve.anthropic.request import chat_of
from tests.engine.serve.conftest import serving
from tests.engine.serve.scripted import saying, templated
from tests.engine.serve.test_tools import SAID

URL = "/v1/messages"
ASK = {
    "model": "pocket",
    "max_tokens": 12,
    "temperature": 0,
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Open the red door"}]}],
}
# the fields of Claude Code's first request, with two of its many tools
CLAUDE_CODE = ASK | {
    "system": [
        {"type": "text", "text": "You open doors.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Briefly."},
    ],
    "tools": [
        {
            "name": "look_up",
            "description": "Finds a door.",
            "input_schema": {"type": "object", "properties": {"door": {"type": "string"}}},
        },
        {"name": "Bash", "description": "", "input_schema": {"type": "object"}},
    ],
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "medium"},
    "max_tokens": 128,
}


@pytest.fixture
def model(server):
    with templated(server.service.llm):
        yield server


def events(server, body):
    """The named events of a stream."""
    found = []
    with server.http.stream("POST", URL + "?beta=true", json=body | {"stream": True}) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        name = None
        for line in reply.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: "):
                data = json.loads(line[6:])
                assert data["type"] == name
                found.append(data)
    return found


def joined(found):
    """The message that a client makes of the events."""
    assert found[0]["type"] == "message_start" and found[-1]["type"] == "message_stop"
    message, opened = found[0]["message"], None
    for event in found[1:-1]:
        if event["type"] == "content_block_start":
            assert opened is None and event["index"] == len(message["content"])
            opened = event["index"]
            message["content"].append(event["content_block"] | {"partial": ""})
        elif event["type"] == "content_block_delta":
            assert event["index"] == opened
            block, delta = message["content"][opened], event["delta"]
            block["partial"] += delta["text" if block["type"] == "text" else "partial_json"]
        elif event["type"] == "content_block_stop":
            assert event["index"] == opened
            opened = None
        else:
            assert event["type"] == "message_delta" and opened is None
            message |= event["delta"]
            message["usage"] |= event["usage"]
    for block in message["content"]:
        partial = block.pop("partial")
        block["text" if block["type"] == "text" else "input"] = (
            partial if block["type"] == "text" else json.loads(partial)
        )
    return message


def same(one, other):
    """Two messages, but for their ids and what was cached."""
    for message in (one, other):
        message.pop("id")
        usage = message["usage"]
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
        for block in message["content"]:
            block.pop("id", None)
    return one == other


def test_a_system_message_in_the_middle_is_part_of_the_users_turn():
    """As Claude Code 2.1 sends one; some templates take a system's turn at the beginning alone."""
    user = {"role": "user", "content": [{"type": "text", "text": "Open"}]}
    late = {"role": "system", "content": "Agents: none."}
    done = {"role": "assistant", "content": "Done."}
    found = chat_of(ASK | {"system": "S", "messages": [user, late, done, late, user]})
    assert [(turn["role"], turn["content"]) for turn in found["messages"]] == [
        ("system", "S"),
        ("user", "Open\nAgents: none."),
        ("assistant", "Done."),
        ("user", "Agents: none.\nOpen"),
    ]


def test_a_text_whole_and_as_events(server):
    whole = server.post(URL, ASK).json()
    assert whole["type"] == "message" and whole["role"] == "assistant"
    assert whole["stop_reason"] in ("max_tokens", "end_turn")
    assert whole["usage"]["output_tokens"] <= 12 and whole["content"][0]["text"]
    chat = server.openai.chat.completions.create(
        model="pocket",
        messages=[{"role": "user", "content": "Open the red door"}],
        max_tokens=12,
        temperature=0,
    )
    assert whole["content"][0]["text"] == chat.choices[0].message.content
    streamed = joined(events(server, ASK))
    assert same(streamed, whole)
    count = server.post(URL + "/count_tokens", ASK).json()
    assert count == {"input_tokens": chat.usage.prompt_tokens}
    stop = chat.choices[0].message.content[4:8]
    cut = server.post(URL, ASK | {"stop_sequences": ["never", stop]}).json()
    assert cut["stop_reason"] == "stop_sequence" and cut["stop_sequence"] == stop
    assert stop not in cut["content"][0]["text"]


def test_claude_codes_first_turns(model, monkeypatch):
    with saying(model.service.llm, SAID, monkeypatch):
        whole = model.post(URL, CLAUDE_CODE).json()
        streamed = joined(events(model, CLAUDE_CODE))
    assert whole["stop_reason"] == "tool_use", whole
    text, call = whole["content"]
    assert text == {"type": "text", "text": "Well. "}
    assert call["name"] == "look_up" and call["input"] == {"door": "red"}
    turns = [*CLAUDE_CODE["messages"], {"role": "assistant", "content": list(whole["content"])}]
    result = {
        "type": "tool_result",
        "tool_use_id": call["id"],
        "content": [{"type": "text", "text": "It is locked."}],
        "is_error": True,
    }
    turns.append({"role": "user", "content": [result, {"type": "text", "text": "And now?"}]})
    write, seen = model.service.llm.tokenizer.write, []
    monkeypatch.setattr(
        model.service.llm.tokenizer,
        "write",
        lambda *a, **k: seen.append(write(*a, **k)) or seen[-1],
    )
    with saying(model.service.llm, "Alas.", monkeypatch):
        again = model.post(URL, CLAUDE_CODE | {"messages": turns}).json()
    assert again["content"] == [{"type": "text", "text": "Alas."}]
    assert again["stop_reason"] == "end_turn"
    assert "<tool_response>\nError: It is locked.\n</tool_response><|user|>And now?" in seen[0].text
    assert "You open doors.\nBriefly." in seen[0].text and '"Finds a door."' in seen[0].text
    assert same(streamed, whole)


@pytest.mark.parametrize(
    "change, named",
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "developer", "content": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": "{"}]}, "messages"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"container": "a"}, "container"),
        ({"context_management": {"edits": [{"type": "other"}]}}, "context_management"),
        ({"context_management": {"edits": 1}}, "context_management"),
        ({"context_management": {"edits": {"a": 1}}}, "context_management"),
        ({"output_config": {"format": {}}}, "output_config.format"),
        ({"tools": [{"type": "web_search_20250305", "name": "a"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"name": "a", "input_schema": 5}]}, "tools[0].input_schema"),
        ({"temperature": 3}, "temperature"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"model": "claude"}, "model"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(server, change, named):
    reply = server.post(URL, ASK | change)
    assert reply.status_code in (400, 404), reply.text
    error = reply.json()
    assert error["type"] == "error"
    assert error["error"]["type"] in ("invalid_request_error", "not_found_error")
    assert error["error"]["message"].startswith(f"{named}:"), error


def test_errors_before_the_route_have_anthropics_form_too(pocket):
    with serving(pocket, keys=["correct-horse"], load=False) as locked:
        for path in (URL, URL + "/count_tokens"):
            error = locked.post(path, ASK).json()
            assert error["type"] == "error" and error["error"]["type"] == "authentication_error"
        error = locked.post(URL, ASK, headers={"x-api-key": "correct-horse"})
        assert error.status_code == 503 and error.json()["error"]["type"] == "overloaded_error"
