"""Texts on their way to tokens: bounded, the shortest first, dropped when their client has gone,
refused where they cannot fit, and nobody else stops meanwhile.
"""

import asyncio
import json
import socket
import threading

import pytest
import tokenizers

from engine.serve import texts
from engine.serve.errors import ApiError
from engine.serve.request.prompts import PIECE
from engine.serve.texts import SHORT, Texts
from engine.text.characters import most_characters

CHAT = "/v1/chat/completions"


class Held:
    """A call that lasts until it is let go, and what ran."""

    def __init__(self):
        self.go, self.began, self.ran = threading.Event(), threading.Event(), []

    def __call__(self):
        self.began.set()
        assert self.go.wait(20)

    def note(self, name):
        return lambda: self.ran.append(name)


async def staying():
    return False


async def gone():
    return True


def test_short_texts_pass_long_ones_and_less_long_ones_too():
    async def run():
        held, line = Held(), Texts(4)
        first = asyncio.ensure_future(line.run(SHORT + 1, staying, held))
        await asyncio.to_thread(held.began.wait)
        waiting = [
            asyncio.ensure_future(line.run(size, staying, held.note(size)))
            for size in (90 << 20, 20 << 20, 50 << 20)
        ]
        await line.run(SHORT, staying, held.note("short"))
        assert held.ran == ["short"]
        held.go.set()
        await asyncio.gather(first, *waiting)
        assert held.ran == ["short", 20 << 20, 50 << 20, 90 << 20]

    asyncio.run(run())


def test_too_many_texts_are_refused_and_those_of_clients_that_left_take_no_place():
    async def run():
        held, line = Held(), Texts(2)
        first = asyncio.ensure_future(line.run(SHORT + 1, staying, held))
        await asyncio.to_thread(held.began.wait)
        leaves = False

        async def left():
            return leaves

        stays = asyncio.ensure_future(line.run(SHORT + 1, staying, held.note("stays")))
        leaver = asyncio.ensure_future(line.run(SHORT + 1, left, held.note("leaver")))
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as refused:
            await line.run(SHORT + 1, staying, held.note("refused"))
        assert refused.value.status == 429 and refused.value.headers["Retry-After"]
        leaves = True
        with pytest.raises(ApiError, match="the client left"):
            await leaver
        with pytest.raises(ApiError, match="the client left"):
            await line.run(1, gone, held.note("was never there"))
        late = asyncio.ensure_future(line.run(SHORT + 1, staying, held.note("late")))
        await asyncio.sleep(0)
        held.go.set()
        await asyncio.gather(first, stays, late)
        assert held.ran == ["stays", "late"]

    asyncio.run(run())


def test_clients_that_left_cost_the_others_nothing(server, monkeypatch):
    """Three of a megabyte, sent and given up, in front of a short one: none is read."""
    read, prompts = [], server.service.prompts
    text = prompts.text

    def slowly(content, *how):
        read.append(len(content))
        return text(content[:100], *how)

    monkeypatch.setattr(prompts, "text", slowly)
    monkeypatch.setattr(texts.Texts, "run", slower(texts.Texts.run))
    body = json.dumps({"text": " " * 1_000_000}).encode()
    monkeypatch.setattr(prompts, "characters", None)
    head = b"POST /v1/tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as made:
            made.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert server.post("/v1/tokenize", {"text": "hi"}).status_code == 200
    assert set(read) == {2}


def slower(run):
    """A moment in which a client's leaving arrives."""

    async def later(self, size, left, call):
        if size > SHORT:
            for _ in range(200):
                if await left():
                    break
                await asyncio.sleep(0.01)
        return await run(self, size, left, call)

    return later


@pytest.mark.parametrize(
    "path", [CHAT, "/v1/completions", "/v1/messages", "/v1/responses", "/v1/tokenize"]
)
def test_a_text_that_cannot_fit_is_refused_unread(server, path, monkeypatch):
    def never(*arguments):
        raise AssertionError("it was read")

    for name in ("chat", "text"):
        monkeypatch.setattr(server.service.prompts, name, never)
    most = server.service.prompts.characters * server.service.llm.max_context
    text = "a" + " " * most + "a"
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    if path == "/v1/completions":
        body = {"prompt": text}
    elif path == "/v1/tokenize":
        body = {"text": text}
    elif path == "/v1/responses":
        body = {"input": text}
    reply = server.post(path, body)
    assert reply.status_code == 400, reply.text
    message = reply.json()["error"]["message"]
    assert f"found {most + 2} characters, expected at most {most}" in message, message


def test_a_text_of_far_too_many_tokens_is_refused_before_it_is_read_whole(server, monkeypatch):
    """Where the tokenizer's longest token is long, the characters alone say little."""
    prompts, longest = server.service.prompts, []
    encode = type(prompts.tokenizer)._encoded

    def noted(self, text, *arguments, **settings):
        longest.append(len(text))
        return encode(self, text, *arguments, **settings)

    monkeypatch.setattr(type(prompts.tokenizer), "_encoded", noted)
    monkeypatch.setattr(prompts, "characters", 1000)
    text = "x " * 400_000
    for path, body in [
        (CHAT, {"messages": [{"role": "user", "content": text}]}),
        ("/v1/completions", {"prompt": text}),
        ("/v1/tokenize", {"text": text}),
    ]:
        reply = server.post(path, body)
        assert reply.status_code == 400, reply.text
        assert "expected at most 4095: this server's context" in reply.json()["error"]["message"]
    assert max(longest) == PIECE


def test_white_space_around_a_text_counts_nothing(server):
    """Templates trim it."""
    text = "hi" + " " * (server.service.prompts.characters * server.service.llm.max_context)
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": text}]}
    assert server.post(CHAT, body).status_code == 200


def test_other_threads_run_while_a_long_text_becomes_tokens(server):
    """The tokenizer's plain call holds the interpreter for all of it."""
    prompts, ticks, stop = server.service.prompts, [], threading.Event()

    def tick():
        while not stop.wait(0.001):
            ticks.append(0)

    thread = threading.Thread(target=tick)
    thread.start()
    before = len(ticks)
    ids = prompts.tokenizer.encode("a b" * 200_000)
    during = len(ticks) - before
    stop.set()
    thread.join()
    assert during > 20
    assert ids == prompts.tokenizer.backend.encode("a b" * 200_000, add_special_tokens=False).ids


def test_one_token_spells_no_more_characters_than_is_said(server):
    """Random texts of its own tokens, of which the longest are repeated."""
    tokenizer = server.service.llm.tokenizer
    most = most_characters(tokenizer)
    assert most is not None
    longest = sorted(tokenizer.backend.get_vocab(), key=len)[-8:]
    for token in longest:
        text = tokenizer.backend.decode([tokenizer.backend.token_to_id(token)]) * 500
        assert len(text) <= most * len(tokenizer.encode(text, special=False))


def made(model, **parts):
    backend = tokenizers.Tokenizer(model)
    for name, part in parts.items():
        setattr(backend, name, part)

    class Made:
        pass

    Made.backend = backend
    return Made


def test_tokenizers_that_may_leave_characters_out_have_no_bound():
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {byte: number for number, byte in enumerate(sorted(alphabet))}
    whole = tokenizers.models.BPE(vocab=vocabulary, merges=[])
    level = tokenizers.pre_tokenizers.ByteLevel()
    normal = tokenizers.normalizers
    assert most_characters(made(whole, pre_tokenizer=level)) == 1
    assert most_characters(made(whole, pre_tokenizer=level, normalizer=normal.NFC())) == 4
    replaced = normal.Replace(" ", "_")
    assert most_characters(made(whole, pre_tokenizer=level, normalizer=replaced)) == 1
    for bad in (
        normal.Strip(),
        normal.Replace("  ", " "),
        normal.Replace(tokenizers.Regex(" +"), " "),
    ):
        assert most_characters(made(whole, pre_tokenizer=level, normalizer=bad)) is None
    split = tokenizers.pre_tokenizers.Split(" ", "removed")
    assert most_characters(made(whole, pre_tokenizer=split)) is None
    space = tokenizers.pre_tokenizers.Whitespace()
    assert most_characters(made(whole, pre_tokenizer=space)) is None
    absorbs = made(whole, pre_tokenizer=level)
    absorbs.backend.add_special_tokens([tokenizers.AddedToken("<|end|>", rstrip=True)])
    assert most_characters(absorbs) is None
    few = tokenizers.models.BPE(vocab={"a": 0}, merges=[])
    assert most_characters(made(few, pre_tokenizer=level)) is None
    words = tokenizers.models.WordLevel({"a": 0, "?": 1}, unk_token="?")
    assert most_characters(made(words)) is None
