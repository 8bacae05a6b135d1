"""POST /v1/responses through the official client: the first requests of Codex CLI.

Stops: events out of order or without their items, a call whose result is not seen, something said
to be stored, a field that is ignored.
"""

import asyncio
import json

import openai
import pytest

from tests.engine.serve.scripted import saying, templated
from tests.engine.serve.test_tools import SAID

FUNCTION = {
    "type": "function",
    "name": "look_up",
    "description": "Finds a door.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"door": {"type": "string"}}},
}


def user(text):
    return {
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": text}],
    }


# the fields of Codex CLI's first request
CODEX = {
    "model": "pocket",
    "instructions": "You open doors.",
    "input": [user("<environment_context>here</environment_context>"), user("Open the red door")],
    "tools": [FUNCTION, {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "low"},
}


@pytest.fixture
def model(server):
    with templated(server.service.llm):
        yield server


def test_a_text_whole_and_as_events(server):
    settings = {"model": "pocket", "input": "Open the red door", "temperature": 0}
    whole = server.openai.responses.create(**settings, max_output_tokens=10)
    chat = server.openai.chat.completions.create(
        model="pocket",
        messages=[{"role": "user", "content": "Open the red door"}],
        max_tokens=10,
        temperature=0,
    )
    assert whole.output_text == chat.choices[0].message.content and whole.output_text
    cut = chat.choices[0].finish_reason == "length"
    assert whole.status == ("incomplete" if cut else "completed")
    assert whole.usage.output_tokens == chat.usage.completion_tokens
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens

    async def streamed():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = await client.responses.create(**settings, max_output_tokens=10, stream=True)
            return [event async for event in stream]

    events = asyncio.run(streamed())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    ends = ["output_text.done", "content_part.done", "output_item.done"]
    assert kinds[-4:] == [*ends, "incomplete" if cut else "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert "".join(e.delta for e in events if e.type.endswith("text.delta")) == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.total_tokens == whole.usage.total_tokens


def test_codex_first_turns(model, monkeypatch):
    with saying(model.service.llm, SAID, monkeypatch):
        with model.openai.responses.stream(**CODEX) as stream:
            events = list(stream)
            final = stream.get_final_response()
        whole = model.openai.responses.create(**CODEX)
    for response in (final, whole):
        text, call = response.output
        assert text.content[0].text == "Well. " and response.status == "completed"
        assert call.type == "function_call" and call.name == "look_up"
        assert json.loads(call.arguments) == {"door": "red"}
    done = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert json.loads(done[0].arguments) == {"door": "red"} and done[0].output_index == 1
    turns = [
        *CODEX["input"],
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        *(item.model_dump(exclude_none=True) for item in whole.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "It is locked."},
    ]
    write, seen = model.service.llm.tokenizer.write, []
    monkeypatch.setattr(
        model.service.llm.tokenizer,
        "write",
        lambda *a, **k: seen.append(write(*a, **k)) or seen[-1],
    )
    with saying(model.service.llm, "Alas.", monkeypatch):
        again = model.openai.responses.create(**CODEX | {"input": turns})
    assert again.output_text == "Alas."
    text = seen[0].text
    assert "<tool_response>\nIt is locked.\n</tool_response>" in text
    assert "</environment_context>\n\nOpen the red door" in text and "You open doors." in text
    assert text.count("<|assistant|>") == 2 and "apply_patch" not in text


@pytest.mark.parametrize(
    "change, param",
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"input": []}, "input"),
        ({"input": [{"type": "image_generation_call"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"tools": [5]}, "tools[0]"),
        ({"tool_choice": {"type": "web_search"}, "tools": [FUNCTION]}, "tool_choice"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(model, change, param):
    reply = model.post("/v1/responses", {"model": "pocket", "input": "a"} | change)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
