"""The server called in its own process, as a replica does: the same replies as over a connection,
and an answer that ends when its reader leaves.
"""

import asyncio
import contextlib
import json

import pytest

pytest.importorskip("starlette")

from engine.fleet.asgi import Asked, Begun, answered
from engine.serve.app import make_app
from engine.serve.guards import LOOPBACK, Guard
from tests.engine.serve.conftest import pocket, serving  # noqa: F401

HEADERS = [(b"host", b"localhost"), (b"content-type", b"application/json")]
BODY = {"messages": [{"role": "user", "content": "Open the red door"}], "temperature": 0}


@pytest.fixture(scope="module")
def server(pocket):  # noqa: F811
    with serving(pocket, slots=2) as running:
        yield running


def asked(body=None, path="/v1/chat/completions", method="POST", headers=HEADERS):
    return Asked(method, path, b"", headers, b"" if body is None else json.dumps(body).encode())


def replied(server, what):
    """(status, body) of a reply, put together."""
    app = make_app(server.service, Guard([], LOOPBACK, 1 << 20))

    async def work():
        begun, *parts = [part async for part in answered(app, what)]
        assert isinstance(begun, Begun)
        return begun.status, b"".join(parts)

    return asyncio.run(work())


def test_replies_are_those_of_a_connection(server):
    body = {**BODY, "max_tokens": 6}
    status, whole = replied(server, asked(body))
    over = server.post("/v1/chat/completions", body)
    assert status == over.status_code == 200
    assert json.loads(whole)["choices"] == over.json()["choices"]
    status, stream = replied(server, asked({**body, "stream": True}))
    assert status == 200 and stream.endswith(b"data: [DONE]\n\n")
    for what in (
        asked({**body, "n": 0}),
        asked(path="/nowhere", method="GET"),
        asked(body, headers=[(b"host", b"evil.example"), HEADERS[1]]),
        asked(path="/health", method="GET"),
    ):
        status, whole = replied(server, what)
        headers = {name.decode(): value.decode() for name, value in what.headers}
        over = server.http.request(what.method, what.path, content=what.body, headers=headers)
        assert (status, json.loads(whole)) == (over.status_code, over.json())


def test_an_answer_ends_when_its_reader_leaves(server):
    app = make_app(server.service, Guard([], LOOPBACK, 1 << 20))
    body = {**BODY, "max_tokens": 3000, "stream": True, "ignore_eos": True}

    async def work():
        async with contextlib.aclosing(answered(app, asked(body))) as parts:
            assert (await parts.__anext__()).status == 200
            await parts.__anext__()
            assert server.worker.running == 1
        for _ in range(500):
            if not server.worker.running:
                return True
            await asyncio.sleep(0.01)
        return False

    assert asyncio.run(work())


def test_an_application_that_fails_is_heard():
    async def broken(scope, receive, send):
        raise RuntimeError("out of ink")

    async def work():
        return [part async for part in answered(broken, asked({}))]

    with pytest.raises(RuntimeError, match="out of ink"):
        asyncio.run(work())
