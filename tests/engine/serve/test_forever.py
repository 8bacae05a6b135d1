"""A server whose conversations have no end: the shipped model, a store of 128 tokens.

Stops: a turn that is read from the beginning once its beginning is forgotten, a conversation that
another one's forgotten beginning is taken for, a limit that still ends one, forgetting untold.
"""

import pytest

from engine import LLM, InfLLM, StreamingLLM
from engine.base import newest_tokens
from tests.builders import POCKET, random_ids
from tests.engine.serve.conftest import serving
from tests.engine.serve.test_slots import Talk


@pytest.fixture(scope="module")
def llm():
    method = StreamingLLM(tokens=128)
    return LLM(str(POCKET), method=method, forever=True, chunk=64, threads=1)


def test_usage_says_what_is_forgotten_in_every_interface(llm):
    with serving(llm) as server:
        facts = server.http.get("/v1/models").json()["data"][0]
        assert facts["max_model_len"] == 2**31 - 2**16
        turns = [{"role": "user", "content": "The cat is grey. " * 60}]
        told = []
        for path, more in (
            ("/v1/chat/completions", {"messages": turns}),
            ("/v1/messages", {"messages": turns}),
            ("/v1/responses", {"input": turns}),
        ):
            limit = {"max_output_tokens": 4} if "input" in more else {"max_tokens": 4}
            reply = server.post(path, {**more, **limit})
            assert reply.status_code == 200, reply.text
            told.append(reply.json()["usage"])
        for usage in told:
            read = usage.get("prompt_tokens", usage.get("input_tokens", 0))
            read += usage.get("cache_read_input_tokens", 0)
            written = usage.get("completion_tokens", usage.get("output_tokens"))
            assert usage["forgotten_tokens"] == read + written - 128 > 100


def test_blocks_that_are_forgotten_are_told_too(llm):
    """InfLLM by another session's rules: 4 blocks of 16 beside 8 first tokens and 48 newest."""
    sizes = dict(block=16, init=8, local=48, topk=2, cached=4, chunk=32, blocks=4)
    with serving(LLM.sharing(llm, method=InfLLM(**sizes))) as server:
        body = {"messages": [{"role": "user", "content": "The cat is grey. " * 60}]}
        usage = server.post("/v1/chat/completions", {**body, "max_tokens": 4}).json()["usage"]
        held = usage["prompt_tokens"] + usage["completion_tokens"] - usage["forgotten_tokens"]
        assert usage["forgotten_tokens"] > 100 and 8 + 64 + 48 <= held < 8 + 64 + 48 + 16


def test_an_answer_without_a_limit_ends(llm):
    with serving(llm) as server:
        body = {"messages": [{"role": "user", "content": "Go on."}], "ignore_eos": True}
        usage = server.post("/v1/chat/completions", body).json()["usage"]
        assert usage["completion_tokens"] == llm.planner.max_context == 192


def test_a_conversation_goes_on_from_what_is_held(llm, monkeypatch):
    """Though its beginning, ids and all, is forgotten; another beginning is read anew."""
    monkeypatch.setattr(newest_tokens, "KEPT", 256)
    monkeypatch.setattr(newest_tokens, "BLOCK", 64)
    ids = random_ids(700, 5000, seed=1)
    with Talk(llm, slots=1) as talk:
        answer, cached = talk.ask(ids)
        assert cached == 0
        ids = [*ids, *answer, *random_ids(40, 5000, seed=2)]
        answer, cached = talk.ask(ids)
        assert cached == len(ids) - 40
        other = [*ids, *answer, 7]
        other[3] += 1
        assert talk.ask(other)[1] == 0
        # the same again, and then its own way: as before
        again = [*ids, *answer, 9]
        assert talk.ask(again)[1] == 0 and talk.ask([*again, 5])[1] in (0, len(again))
