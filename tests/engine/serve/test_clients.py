"""Requests in the shapes that clients send, replayed; docs/SERVER.md has the table of what was run.

Recorded from the programs where they run without their own service, else read from their source:
the texts and tools are ours. Stops: a field of a well-known client refused, a stream that it cannot
end, a refusal without words that it can show.
"""

import json

import pytest

from engine import LLM
from tests.engine.serve.conftest import serving
from tests.engine.serve.tool_checkpoint import tool_checkpoint

pytest.importorskip("llguidance")

CHAT, TEXT, MESSAGES, ITEMS = (
    f"/v1/{name}" for name in ("chat/completions", "completions", "messages", "responses")
)
ASKED = [
    {"role": "system", "content": "The grass is green."},
    {"role": "user", "content": "Open the red door"},
]
DOOR = {"type": "object", "required": ["door"], "properties": {"door": {"enum": ["red", "blue"]}}}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Finds a door.", "parameters": DOOR},
}
PARTS = [{"role": "user", "content": [{"type": "text", "text": "Open the red door"}]}]
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "Key",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "owner": {"enum": ["A", "B"], "type": "string"},
                "right": {"type": "boolean"},
            },
            "required": ["owner", "right"],
            "additionalProperties": False,
        },
    },
}
KEY = {"type": "function", "function": {"name": "Key", "description": "", "parameters": DOOR}}
ONE_KEY = {"type": "function", "function": {"name": "Key"}}
# (client, address, body beside the model's name)
ANSWERED = [
    ("LiteLLM", CHAT, {"messages": ASKED, "max_tokens": 8, "temperature": 0}),
    ("LiteLLM", CHAT, {"messages": ASKED, "max_tokens": 8, **USAGE}),
    ("LiteLLM", CHAT, {"messages": ASKED, "max_tokens": 8, "tools": [TOOL], "tool_choice": "auto"}),
    ("LiteLLM", CHAT, {"messages": ASKED, "max_tokens": 8, "reasoning_effort": "low"}),
    (
        "LiteLLM",
        CHAT,
        {"messages": ASKED, "max_tokens": 8, "response_format": {"type": "json_object"}},
    ),
    ("LiteLLM", TEXT, {"prompt": "The code", "max_tokens": 4}),
    (
        "LiteLLM, anthropic/",
        MESSAGES,
        {
            "messages": PARTS,
            "max_tokens": 120,
            "system": [{"type": "text", "text": "The grass is green."}],
            "tools": [{"name": "look_up", "input_schema": DOOR, "type": "custom"}],
            "tool_choice": {"type": "any"},
        },
    ),
    ("LiteLLM, responses", ITEMS, {"input": "hi", "max_output_tokens": 16}),
    (
        "LangChain",
        CHAT,
        {"messages": ASKED, "max_completion_tokens": 8, "stream": False, "temperature": 0.0},
    ),
    (
        "LangChain",
        CHAT,
        {"messages": ASKED, "max_completion_tokens": 8, "temperature": 0.0, **USAGE},
    ),
    (
        "LangChain",
        CHAT,
        {"messages": ASKED, "max_completion_tokens": 60, "response_format": SCHEMA},
    ),
    (
        "LangChain",
        CHAT,
        {
            "messages": ASKED,
            "max_completion_tokens": 90,
            "parallel_tool_calls": False,
            "tools": [KEY],
            "tool_choice": ONE_KEY,
        },
    ),
    (
        "LangChain, responses",
        ITEMS,
        {
            "input": [{**m, "type": "message"} for m in ASKED],
            "max_output_tokens": 24,
            "temperature": 0.0,
        },
    ),
    ("Continue", CHAT, {"messages": ASKED, "max_tokens": 8, "stream": False}),
    (
        "Continue",
        CHAT,
        {"messages": ASKED, "max_tokens": 90, "tools": [TOOL], "tool_choice": "required", **USAGE},
    ),
    ("Continue", TEXT, {"prompt": "The code", "max_tokens": 4, "stream": True}),
    # with its settings for a model, and the request that names a conversation
    (
        "Open WebUI",
        CHAT,
        {
            "messages": ASKED,
            "max_tokens": 8,
            "temperature": 0.7,
            "top_p": 0.9,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "reasoning_effort": "high",
            "seed": 1,
            "stop": ["\n\n\n"],
            "logit_bias": {"5": -1},
            **USAGE,
        },
    ),
    ("Open WebUI, a title", CHAT, {"messages": ASKED[1:], "max_tokens": 8, "stream": False}),
]
# (client, address, body, status, what it is told)
REFUSED = [
    ("LiteLLM", "/v1/embeddings", {"input": ["x"]}, 501, "no embeddings"),
    (
        "Continue",
        "/v1/embeddings",
        {"input": ["x"], "encoding_format": "base64"},
        501,
        "no embeddings",
    ),
    ("Continue", "/v1/rerank", {"query": "q", "documents": ["x"]}, 501, "ranks no documents"),
    (
        "Continue",
        "/v1/fim/completions",
        {"prompt": "a", "suffix": "b", "stream": True},
        404,
        "no such address",
    ),
    (
        "Open WebUI, Continue of an answer, provider llama.cpp",
        CHAT,
        {
            "messages": [*ASKED, {"role": "assistant", "content": "It"}],
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
        400,
        ": not supported by this server",
    ),
    (
        "Open WebUI, an image",
        CHAT,
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "What is this?"},
                        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                    ],
                }
            ]
        },
        400,
        "expected parts of type text",
    ),
    (
        "LangChain, a model without such a switch",
        CHAT,
        {"messages": ASKED, "chat_template_kwargs": {"enable_thinking": False}},
        400,
        "does not read",
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tool_checkpoint(tmp_path_factory.mktemp("clients"))
    llm = LLM(str(folder), max_context=2048, threads=1, chunk=128, load=False)
    with serving(llm, slots=2) as running:
        yield running


def name_of(case):
    return f"{case[0]} {case[1]}" if isinstance(case, tuple) else str(case)


@pytest.mark.parametrize("case", ANSWERED, ids=name_of)
def test_what_clients_send_is_answered(model, case):
    _, path, body = case
    reply = model.post(path, {"model": "pocket", **body})
    assert reply.status_code == 200, reply.text
    if not body.get("stream"):
        found = reply.json()
        usage = found["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) > 0
        if body.get("tool_choice") not in (None, "auto"):
            assert "look_up" in reply.text or "Key" in reply.text
        if body.get("response_format") is SCHEMA:
            assert json.loads(found["choices"][0]["message"]["content"])["owner"] in "AB"
        return
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    ends = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert ends[-1] and not any(ends[:-1])
    if "stream_options" in body:
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0
    if body.get("tool_choice") == "required":
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"]]
        (call,) = [call for delta in deltas for call in delta.get("tool_calls", [])]
        assert json.loads(call["function"]["arguments"])["door"] in ("red", "blue")


@pytest.mark.parametrize("case", REFUSED, ids=name_of)
def test_what_is_refused_says_why(model, case):
    _, path, body, status, words = case
    reply = model.post(path, {"model": "pocket", **body})
    assert reply.status_code == status and words in reply.json()["error"]["message"], reply.text
    assert "\n" not in reply.json()["error"]["message"]


def test_every_client_finds_the_model(model):
    assert model.http.get("/v1/models").json()["data"][0]["id"] == "pocket"
