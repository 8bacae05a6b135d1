"""POST /v1/forget: what is held of a text goes, by its content alone; nothing else does.

Stops: a text that stays in memory or on disk, another text that goes with it, a word with which
everything begins, a client that names a path.
"""

import pytest
import torch

from engine import LLM
from engine.saved.cache import BlockCache
from engine.saved.container import Reader
from engine.saved.rows import PIECE
from tests.builders import POCKET
from tests.engine.serve.conftest import serving

SHARED = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back.\n" * 12
)
ONE = SHARED + "The violin of Hugo is red. " * 60
OTHER = SHARED + "The parrot of Nora is blue. " * 60


def asked(server, text, question="\n\nWho?", **more):
    """(tokens, tokens that were held) of a question about a text."""
    body = {"messages": [{"role": "user", "content": text + question}], "max_tokens": 4}
    usage = server.post("/v1/chat/completions", body | {"temperature": 0}, **more).json()["usage"]
    server.until(lambda: server.worker.running == 0)
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def forget(server, text, **more):
    return server.post("/v1/forget", {"messages": [{"role": "user", "content": text}]} | more)


def kept(server, folder):
    """The texts of all blocks on disk."""
    found, ids = [], torch.empty(PIECE, dtype=torch.int64)
    for path in folder.rglob("*.block"):
        with Reader(path) as reader:
            reader.read("ids", ids)
        found.append(server.service.llm.tokenizer.decode(ids.tolist()))
    return found


def test_a_text_is_forgotten_with_what_followed_it_and_another_stays(tmp_path):
    llm = LLM(POCKET, max_context=2048, threads=1, chunk=256, load=False)
    with serving(llm, slots=2, cache=BlockCache(tmp_path)) as server:
        tokens, _ = asked(server, ONE)
        assert asked(server, ONE, "\n\n" + "Who plays it? " * 60)[1] > tokens - 16
        asked(server, OTHER)
        assert sum("violin" in text for text in kept(server, tmp_path)) >= 2
        assert any("plays" in text for text in kept(server, tmp_path))
        others = [text for text in kept(server, tmp_path) if "parrot" in text]
        assert others and asked(server, OTHER)[1] > tokens - 16
        reply = forget(server, ONE, path=str(tmp_path), folder="/", id="../..")
        assert reply.status_code == 200 and reply.json()["sessions"] == 1
        assert reply.json()["blocks"] >= 3
        assert not any("violin" in t or "plays" in t for t in kept(server, tmp_path))
        assert [text for text in kept(server, tmp_path) if "parrot" in text] == others
        assert asked(server, OTHER)[1] > tokens - 16
        assert asked(server, ONE)[1] < tokens / 2 + 16
        assert forget(server, ONE).json()["blocks"] >= 2
        assert forget(server, ONE).json() == {"sessions": 0, "blocks": 0}


def test_a_session_of_another_key_stays(pocket):
    """Two who begin with the same text, and one of whom forgets it."""
    one, other = ({"Authorization": f"Bearer long-enough-{n}"} for n in (1, 2))
    with serving(pocket, keys=["long-enough-1", "long-enough-2"], slots=2) as server:
        tokens, _ = asked(server, ONE, headers=one)
        body = {"messages": [{"role": "user", "content": SHARED}]}
        assert server.post("/v1/forget", body, headers=other).json()["sessions"] == 0
        assert asked(server, ONE, headers=one)[1] > tokens - 16
        assert server.post("/v1/forget", body, headers=one).json()["sessions"] == 1


@pytest.mark.parametrize("text", ["", "The", "The grass is green."])
def test_a_text_with_which_others_begin_is_refused(server, text):
    asked(server, ONE)
    sessions = len(server.worker.slots.slots)
    reply = forget(server, text)
    assert reply.status_code == 400 and "fewer than 32 tokens" in reply.json()["error"]["message"]
    assert len(server.worker.slots.slots) == sessions


def test_it_needs_the_key_and_messages(pocket):
    with serving(pocket, keys=["correct-horse"]) as server:
        assert forget(server, ONE).status_code == 401
        headers = {"Authorization": "Bearer correct-horse"}
        reply = server.post("/v1/forget", {"path": "/etc"}, headers=headers)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages"
