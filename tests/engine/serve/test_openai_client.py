"""The official client drives every endpoint and option, streaming and not, sync and async.

Stops: an answer that is not the library's, usage that does not add up, a stream that the client
cannot read, an option that is ignored.
"""

import asyncio
from functools import partial

import openai
import pytest

from engine import SamplingParams

QUESTION = [{"role": "user", "content": "What is the code of the red door?"}]


def alone(server, messages, **settings):
    """What the library says to the same messages, in a session of its own."""
    llm = server.service.llm
    ids = server.service.prompts.chat(messages).ids
    with llm.session() as session:
        pieces = list(session.generate(ids, SamplingParams(**settings)))
    return "".join(p.text for p in pieces).lstrip(), pieces


@pytest.fixture(scope="module")
def expected(pocket, server):
    """Answers of the library, before any request: the worker's thread owns the model later."""
    return {n: alone(server, QUESTION, max_tokens=n) for n in (1, 12)}


def chat(server, **settings):
    settings = {"model": "pocket", "messages": QUESTION, "temperature": 0, **settings}
    return server.openai.chat.completions.create(**settings)


def test_a_chat_is_the_librarys_answer(server, expected):
    text, pieces = expected[12]
    reply = chat(server, max_tokens=12)
    assert reply.choices[0].message.content == text and text
    assert reply.choices[0].message.role == "assistant" and reply.object == "chat.completion"
    finish = {"stop": "stop", "length": "length"}[pieces[-1].finish_reason]
    assert reply.choices[0].finish_reason == finish
    usage = reply.usage
    assert usage.completion_tokens == sum(p.token_id is not None for p in pieces)
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    again = chat(server, max_completion_tokens=12)
    assert again.choices[0].message.content == text
    assert again.usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens


def test_a_stream_has_the_same_text_its_end_and_its_usage(server, expected):
    chunks = list(chat(server, max_tokens=12, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == expected[12][0]
    ends = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert ends[-1] in ("stop", "length") and set(ends[:-1]) == {None}
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert not any(c.usage for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


def test_async_clients_stream_at_once_and_get_their_own_answers(server):
    questions = [f"Tell me about door {i}, please: {'x ' * i}" for i in range(3)]

    async def one(client, text):
        stream = await client.chat.completions.create(
            model="pocket",
            messages=[{"role": "user", "content": text}],
            temperature=0,
            max_tokens=10,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def everyone():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            together = await asyncio.gather(*(one(client, text) for text in questions))
            return together, [await one(client, text) for text in questions]

    together, in_turn = asyncio.run(everyone())
    assert together == in_turn and len(set(together)) > 1


def test_stop_strings_end_an_answer_and_are_not_shown(server):
    whole = chat(server, max_tokens=14, extra_body={"ignore_eos": True}).choices[0].message.content
    stop = whole[8:11]
    cut = chat(server, max_tokens=14, stop=[stop, "never"], extra_body={"ignore_eos": True})
    assert cut.choices[0].message.content == whole[: whole.index(stop)]
    assert cut.choices[0].finish_reason == "stop"


def test_a_seed_repeats_an_answer_and_choices_differ(server):
    def texts(seed):
        reply = chat(
            server, n=3, seed=seed, temperature=1.5, max_tokens=12, extra_body={"ignore_eos": True}
        )
        assert [c.index for c in reply.choices] == [0, 1, 2]
        assert reply.usage.completion_tokens == 36
        return [c.message.content for c in reply.choices]

    assert texts(5) == texts(5) != texts(6)
    assert len(set(texts(5))) > 1
    stream = chat(server, n=2, seed=5, temperature=1.5, max_tokens=3, stream=True)
    assert {c.choices[0].index for c in stream} == {0, 1}


def test_log_probabilities(server):
    reply = chat(server, max_tokens=5, logprobs=True, top_logprobs=3)
    scored = reply.choices[0].logprobs.content
    assert len(scored) == reply.usage.completion_tokens
    for token in scored:
        assert len(token.top_logprobs) == 3 and token.logprob == token.top_logprobs[0].logprob
        assert token.token == token.top_logprobs[0].token and token.logprob <= 0
        assert bytes(token.bytes).decode() == token.token
    streamed = chat(server, max_tokens=5, logprobs=True, stream=True)
    found = [c.choices[0].logprobs for c in streamed if c.choices[0].logprobs]
    assert [t.logprob for c in found for t in c.content] == [t.logprob for t in scored]


def test_completions(server, expected):
    complete = server.openai.completions.create
    reply = complete(model="pocket", prompt="The code", max_tokens=6, temperature=0, logprobs=2)
    choice = reply.choices[0]
    assert reply.object == "text_completion" and choice.text
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
    assert choice.logprobs.text_offset[0] == 0
    assert all(len(top) <= 2 for top in choice.logprobs.top_logprobs)
    ids = server.post("/v1/tokenize", {"text": "The code", "special": True}).json()["tokens"]
    by_ids = complete(model="pocket", prompt=ids, max_tokens=6, temperature=0)
    assert by_ids.choices[0].text == choice.text
    pieces = list(complete(model="pocket", prompt=ids, max_tokens=6, temperature=0, stream=True))
    assert "".join(c.choices[0].text for c in pieces) == choice.text
    assert complete(model="pocket", prompt=[ids], max_tokens=1).usage.prompt_tokens == len(ids)


def test_an_echoed_prompt_stands_before_every_choice(server):
    """From a text as it was sent, from ids as they are spelt."""
    complete = partial(
        server.openai.completions.create, model="pocket", max_tokens=4, temperature=0, n=2
    )
    ids = server.post("/v1/tokenize", {"text": "The code", "special": True}).json()["tokens"]
    plain = complete(prompt="The code")
    for prompt in ("The code", ids):
        reply = complete(prompt=prompt, echo=True)
        assert [c.text for c in reply.choices] == ["The code" + c.text for c in plain.choices]
        assert reply.usage.completion_tokens == plain.usage.completion_tokens
        texts = ["", ""]
        for chunk in complete(prompt=prompt, echo=True, stream=True):
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == [c.text for c in reply.choices]


def test_presence_and_frequency_penalties_reach_the_sampler(server):
    """A large one leaves no token twice; the same for an asynchronous client's stream."""
    settings = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "logit_bias": {}}
    ids = {i: 50.0 for i in range(200, 206)}  # the answer is made of these six
    plain = chat(server, max_tokens=6, logit_bias=ids, logprobs=True)
    assert len({t.token for t in plain.choices[0].logprobs.content}) < 6
    once = chat(server, max_tokens=6, logprobs=True, **settings | {"logit_bias": ids})
    assert len(once.choices[0].logprobs.content) == 6

    async def streamed():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            stream = await client.chat.completions.create(
                model="pocket",
                messages=QUESTION,
                temperature=0,
                max_tokens=6,
                stream=True,
                **settings | {"logit_bias": ids},
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream])

    assert asyncio.run(streamed()) == once.choices[0].message.content
    found = [t.token for t in once.choices[0].logprobs.content]
    assert len(set(found)) > len({t.token for t in plain.choices[0].logprobs.content})


def test_models_health_texts_and_metrics(server):
    assert [m.id for m in server.openai.models.list()] == ["pocket"]
    assert server.openai.models.retrieve("pocket").id == "pocket"
    assert server.http.get("/health").json() == {"status": "ok"}
    ids = server.post("/v1/tokenize", {"text": "Hello there"}).json()["tokens"]
    assert server.post("/v1/detokenize", {"tokens": ids}).json()["text"] == "Hello there"
    text = server.http.get("/metrics").text
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    assert float(figures["omnikv_written_tokens_total"]) > 0
    assert float(figures["omnikv_cached_tokens_total"]) > 0
    assert float(figures['omnikv_requests_total{path="/v1/chat/completions",status="200"}']) > 0


def test_a_refusal_is_the_clients_own_error(server):
    for settings, field in [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"n": 1000}, "n"),
        ({"stop": [""]}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"extra_body": {"echo": True}}, "echo"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "a " * 9000}]}, "messages"),
    ]:
        with pytest.raises(openai.BadRequestError) as caught:
            chat(server, **settings)
        assert caught.value.param == field and field in caught.value.message
    with pytest.raises(openai.NotFoundError) as missing:
        chat(server, model="gpt-9")
    assert missing.value.code == "model_not_found"
    assert "model: found 'gpt-9', expected " in missing.value.message
    with pytest.raises(openai.NotFoundError) as hostile:
        chat(server, model="\x1b[31m\n" + "\u202e" * 9000)
    said = hostile.value.body["message"]
    assert said.startswith(r"model: found '\x1b[31m\n\u202e\u202e") and len(said) < 600
