"""A model on disk that has tools, served as every other: a call that must come, its result, and the
answer, with nothing scripted in between.

Stops: a template that is never asked, a forced call that another turn writes otherwise, a turn that
is read again.
"""

import json

import pytest

from engine import LLM
from engine.batch.slots import common
from engine.serve.request.calls.scanner import CallScanner
from engine.serve.request.forced import forced
from engine.serve.request.tools import messages_of, tools_of
from tests.engine.serve.conftest import serving
from tests.engine.serve.tool_checkpoint import CODER, QWEN, tool_checkpoint

pytest.importorskip("llguidance")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"To {name} a door.",
            "parameters": {
                "type": "object",
                "properties": {
                    "door": {"enum": ["red", "blue", "grün"]},
                    "keys": {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2},
                },
                "required": ["door", "keys"],
            },
        },
    }
    for name in ("open", "lock")
]
ASKED = [{"role": "user", "content": "Open the red door."}]


@pytest.fixture(scope="module", params=["json", "functions"])
def model(request, tmp_path_factory):
    """One that writes each call as JSON, and one that writes <function=...>."""
    template = {"json": QWEN, "functions": CODER}[request.param]
    folder = tool_checkpoint(tmp_path_factory.mktemp("tools"), template)
    llm = LLM(str(folder), max_context=2048, threads=1, chunk=128, load=False)
    with serving(llm, slots=2) as running:
        yield running


def ask(model, messages, **settings):
    settings = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200} | settings
    return model.openai.chat.completions.create(
        model="pocket", messages=messages, temperature=1, **settings
    )


def checked(call, names=("open", "lock")):
    assert call.type == "function" and call.function.name in names
    found = json.loads(call.function.arguments)
    assert found["door"] in ("red", "blue", "grün") and set(found["keys"]) <= {1, 2}
    return {"name": call.function.name, "arguments": found}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_call_its_result_and_the_answer(model, seed):
    reply = ask(model, ASKED, seed=seed, logprobs=True)
    choice = reply.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls
    checked(call)
    turns = [*ASKED, choice.message.model_dump(exclude_none=True)]
    turns.append({"role": "tool", "tool_call_id": call.id, "content": "It is locked."})
    answer = ask(model, turns, tool_choice="auto", max_tokens=8)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")
    # the call goes back to the character as it was written, so that of its tokens those alone are
    # read again that stand behind one which no tokenizer would choose for this text
    prompts, usage = model.service.prompts, answer.usage
    written = "".join(token.token for token in choice.logprobs.content).removesuffix("<|end|>")
    written = written.replace("\ufffd\ufffd", "ü")  # of two tokens
    tools = tools_of({"tools": TOOLS}).offered
    prompt = prompts.chat(messages_of({"messages": turns}, True), tools)
    assert f"<|assistant|>{written}<|end|>" in prompt.text
    ids = [model.service.llm.tokenizer.backend.token_to_id(t) for t in ("<|assistant|>", "<|end|>")]
    canon = prompt.ids[len(prompt.ids) - 1 - prompt.ids[-2::-1].index(ids[0]) :][:-1]
    canon = canon[: canon.index(ids[1]) + 1]
    spelt = [prompts.tokenizer.backend.decode([i], skip_special_tokens=False) for i in canon]
    same = common(spelt, [token.token for token in choice.logprobs.content])
    assert usage.prompt_tokens_details.cached_tokens == reply.usage.prompt_tokens + same > 40


def test_a_stream_brings_the_demanded_call(model):
    named = {"type": "function", "function": {"name": "lock"}}
    chunks = list(ask(model, ASKED, seed=4, stream=True, tool_choice=named))
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert not "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert len(calls) == 1 and checked(calls[0], ("lock",))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_the_other_interfaces_get_the_call_too(model):
    tools = [
        {"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS
    ]
    body = {"model": "pocket", "max_tokens": 200, "messages": ASKED, "tools": tools}
    reply = model.post("/v1/messages", body | {"tool_choice": {"type": "any"}}).json()
    (block,) = reply["content"]
    assert reply["stop_reason"] == "tool_use" and block["input"]["door"] in ("red", "blue", "grün")
    turns = [*ASKED, {"role": "assistant", "content": [block]}]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": "It is locked."}
    turns.append({"role": "user", "content": [result]})
    again = model.post("/v1/messages", body | {"messages": turns, "max_tokens": 4}).json()
    assert again["usage"]["cache_read_input_tokens"] > 2 * again["usage"]["input_tokens"]
    flat = [{"type": "function", **t["function"]} for t in TOOLS]
    output = model.openai.responses.create(
        model="pocket", input="Open it.", tools=flat, tool_choice="required", store=False
    ).output
    assert [item.type for item in output] == ["function_call"]
    assert json.loads(output[0].arguments)["door"]


HARD = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 3, "maximum": 5},
        "deep": {"type": "object", "properties": {"b": {"enum": [True]}}, "required": ["b"]},
        "mode": {"enum": ["fast", 2, None]},
        "either": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "extra": {"type": "integer", "maximum": 9, "minimum": 0},
    },
    "required": ["a", "deep", "mode", "either"],
}


@pytest.mark.parametrize("seed", range(4))
def test_a_demanded_call_has_the_parameters_of_its_schema(model, seed):
    """Whatever the form: a small model is made to write values of every kind."""
    tools = [{"type": "function", "function": {"name": "set", "parameters": HARD}}]
    choice = ask(model, ASKED, tools=tools, seed=seed, max_tokens=400).choices[0]
    found = json.loads(choice.message.tool_calls[0].function.arguments)
    assert 3 <= found["a"] <= 5 and found["deep"] == {"b": True}
    assert found["either"] in (True, False, None) and found["mode"] in ("fast", 2, None)
    assert found.get("extra", 0) in range(10) and set(found) - {"extra"} == set(HARD["required"])


def test_free_texts_of_a_demanded_function(model):
    """Any text to the first end of a parameter on a line of its own; nothing is left out."""
    prompts = model.service.prompts
    schema = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "more": {"type": ["string", "integer"]}},
        "required": ["text", "unnamed"],
    }
    tools = tools_of(
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
            "tool_choice": "required",
        }
    )

    def follows(**values):
        text = "<tool_call>\n<function=f>\n"
        for key, value in values.items():
            text += f"<parameter={key}>\n{value}\n</parameter>\n"
        grammar = prompts.grammars.lark(forced("functions", tools, {})).begin()
        for token in prompts.text(f"{text}</function>\n</tool_call>", False, False):
            if not grammar.allowed()[token]:
                return False
            grammar.took(token)
        (call,) = CallScanner("functions", tools.schemas).push(f"{text}</function>")
        assert json.loads(call.arguments) == values
        return bool(grammar.allowed()[prompts.grammars.ends[0]])

    assert follows(text="", unnamed="b") and follows(text="a\n\n</para>\nü", unnamed="{}x")
    assert follows(text="a </parameter> b", more="c", unnamed="\n")
    assert not follows(text="a") and not follows(unnamed="b", text="a")
    assert not follows(text="a", other="b", unnamed="c")


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "anyOf": [{"properties": {"a": {}}}]},
        {"type": "object", "properties": {"a>": {"type": "string"}}},
        {"type": "object", "properties": {"a\nb": {"type": "string"}}},
        {"type": "object", "properties": {"": {"type": "string"}}},
        {"type": "object", "properties": {"a" * 300: {"type": "string"}}},
        {"type": "object", "properties": [1]},
        {"type": "object", "required": "a"},
        {"type": "object", "required": [1]},
    ],
)
def test_what_functions_cannot_write_cannot_be_demanded(model, parameters):
    if model.service.prompts.form != "functions":
        pytest.skip("as JSON it can be written, or llguidance refuses it")
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    body = {"messages": ASKED, "tools": tools, "max_tokens": 8}
    reply = model.post("/v1/chat/completions", body | {"tool_choice": "required"})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "tool_choice", reply.text
    assert model.post("/v1/chat/completions", body).status_code == 200
