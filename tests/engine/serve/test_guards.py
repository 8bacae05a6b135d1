"""What a stranger can reach, and what a malformed request can do: nothing.

One test per kind of advisory that other servers had: open to the network, keys compared with ==,
DNS rebinding, huge bodies, counts and nestings, values that are no numbers, special tokens in a
text.
"""

import asyncio
import json
import random
import socket

import pytest
from starlette.datastructures import URL
from starlette.requests import Request

from engine.base.errors import UsageError
from engine.serve.app import make_app
from engine.serve.cli import main
from engine.serve.errors import ApiError
from engine.serve.flags import keys_of, parser
from engine.serve.guards import LOOPBACK, OPEN, Guard
from tests.engine.serve.conftest import serving

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def locked(pocket):
    """A server with a key whose model is never loaded: nothing behind the guard is needed."""
    with serving(pocket, keys=["correct-horse"], load=False) as running:
        yield running


def test_without_a_key_only_the_page_and_health_answer(locked):
    routes = make_app(locked.service, Guard([], [], 1)).routes
    asked = [(how, route.path) for route in routes for how in route.methods]
    guarded = [(how, path) for how, path in asked if path not in OPEN]
    assert len(guarded) >= 12 and ("POST", CHAT) in guarded and ("HEAD", "/metrics") in guarded
    for route in guarded:
        for headers in (
            {},
            {"Authorization": "Bearer wrong-horse"},
            {"Authorization": "Bearer correct-hors"},
            {"Authorization": "Bearer"},
            {"Authorization": "Basic correct-horse"},
            {"x-api-key": "correct-horsf"},
        ):
            reply = locked.http.request(*route, headers=headers)
            assert reply.status_code == 401, (route, headers)
            if route[0] != "HEAD":
                assert reply.json()["error"]["type"] == "authentication_error"
    assert locked.http.get("/health").json() == {"status": "loading"}
    for headers in ({"Authorization": "Bearer correct-horse"}, {"x-api-key": "correct-horse"}):
        assert locked.http.get("/v1/models", headers=headers).status_code == 503  # loading
    assert locked.http.get("/docs").status_code == 404


def test_a_scan_without_a_key_finds_the_page_and_health_alone(locked):
    """Other methods, other spellings, and what other servers answer to."""
    assert OPEN == ("/", "/health", "/readyz", "/livez")
    known = {(how, path) for how in ("GET", "HEAD") for path in OPEN}
    others = """/v1 /v1/ /v1/embeddings /v1/files /props /slots /slots/0?action=save /completion
    /tokenize /apply-template /api/tags /api/pull /load /version /openapi.json /redoc /static/page
    /page.html /engine/serve/page.html /.env /.git/config /health/ /health/.. /%68ealth/x //health
    /v1/models/../../health /v1/models/%2e%2e /v1/models/%00 /metrics/ /METRICS /../../etc/passwd
    /%2e%2e/%2e%2e/etc/passwd /?key=correct-horse /v1/models?api_key=correct-horse""".split()
    routes = make_app(locked.service, Guard([], [], 1)).routes
    for how in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND"):
        for path in [*(route.path for route in routes), *others]:
            if (how, path.partition("?")[0]) in known:
                continue
            reply = raw(locked, f"{how} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            status = int(reply.split(b" ")[1])
            assert status in (400, 401, 404, 405), (how, path, reply)
            assert b"location" not in reply.lower(), (how, path, reply)
            assert b"pocket" not in reply and b"passwd" not in reply.split(b"\r\n\r\n")[1]
    assert locked.service.worker.running == 0 and not locked.service.ready


def asked_with(locked, host, path=CHAT, root="", more=()):
    """The status of a request without a key, by its scope: servers in front differ in what they
    let through.
    """
    app, sent = make_app(locked.service, Guard(["correct-horse"], LOOPBACK, 1 << 20)), []
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": root + path,
        "raw_path": (root + path).encode(),
        "root_path": root,
        "query_string": b"",
        "headers": [*((b"host", name) for name in host), *more],
        "server": ("127.0.0.1", 8080),
    }

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"]


@pytest.mark.parametrize("root", ["", "/behind"])
def test_no_host_header_makes_an_address_one_that_needs_no_key(locked, root, monkeypatch):
    """Starlette before 1.0.1 builds request.url out of the Host header: with this one its path
    is /health, whatever the router took.
    """

    def path_of_host(request):
        host = request.headers.get("host", "")
        return URL(f"http://{host}{request.scope['path']}")

    monkeypatch.setattr(Request, "url", property(path_of_host))
    for host in HOSTILE:
        assert asked_with(locked, [host], root=root) in (400, 401, 403), host
    assert asked_with(locked, [b"localhost:8080"], root=root) == 401
    assert asked_with(locked, [b"localhost"], root=root) == 401
    known = [(b"authorization", b"Bearer correct-horse")]
    assert asked_with(locked, [b"localhost"], root=root, more=known) == 503  # behind the guard


HOSTILE = [
    b"localhost:1/health?",
    b"localhost/health?",
    b"localhost:1/health#",
    b"localhost:80?",
    b"localhost:80 80",
    b"localhost:x",
    b"localhost:",
    b"[::1]/health?",
    b"[::1",
    b"[localhost]",
    b"[::1]x:80",
    b"x@localhost",
    b"x@localhost:80/health?",
    b"localhost\\health",
    b"localhost:123456",
    b"\xe9",
]


@pytest.mark.parametrize("hosts", [LOOPBACK, ()])
def test_a_host_header_that_is_no_name_and_port_is_refused(locked, hosts):
    guard = Guard([], hosts, 1)

    def checked(*names, **more):
        headers = [(b"host", name) for name in names]
        scope = {"type": "http", "http_version": "1.1", "headers": headers, "path": "/", **more}
        return guard.check(Request(scope), "/")

    for host in HOSTILE:
        with pytest.raises(ApiError) as refused:
            checked(host)
        assert refused.value.status in (400, 403), host
    for host in (b"localhost", b"LocalHost:8080", b"127.0.0.1:1", b"[::1]", b"[::1]:8080"):
        checked(host)
    with pytest.raises(ApiError):
        checked(b"localhost", b"localhost")
    with pytest.raises(ApiError) as refused:
        checked(b"localhost", http_version="9.9")
    assert refused.value.status == 505


@pytest.mark.parametrize("origin", ["http://[", "http://[x]", "http://localhost:x", "//", ""])
def test_an_origin_that_is_none_is_refused(server, origin):
    reply = server.http.get("/v1/models", headers={"Origin": origin})
    assert reply.status_code == 403, reply.text


def raw(server, request):
    """The reply to bytes."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as link:
        link.sendall(request.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1))
        data = b""
        while part := link.recv(65536):
            data += part
    return data


def test_pages_of_other_sites_and_other_names_are_refused(server):
    for headers, status in [
        ({"Host": "evil.example"}, 403),
        ({"Host": "evil.example:8080"}, 403),
        ({"Host": ""}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "localhost:1234"}, 200),
        ({"Host": "[::1]:8080"}, 200),
        ({"Origin": "http://localhost:3000"}, 200),
    ]:
        reply = server.http.get("/v1/models", headers=headers)
        assert reply.status_code == status, headers
        assert "access-control-allow-origin" not in reply.headers
    simple = server.http.post(CHAT, content=json.dumps(ASK), headers={"Content-Type": "text/plain"})
    assert simple.status_code == 415  # what a form of another site can send
    assert "found 'text/plain'" in simple.text
    assert "add the header, with curl -H 'content-type: application/json'" in simple.text


def test_bodies_are_bounded(server):
    big = b'{"messages": "' + b"x" * (1 << 20) + b'"}'
    kind = {"Content-Type": "application/json"}
    assert server.http.post(CHAT, content=big, headers=kind).status_code == 413

    def endless():
        yield b'{"a": "'
        for _ in range(40):
            yield b"x" * (1 << 16)

    assert server.http.post(CHAT, content=endless(), headers=kind).status_code == 413
    for bad in (
        b"",
        b"[]",
        b"{",
        b'{"n": NaN}',
        b"\xff",
        b"[" * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}",
    ):
        reply = server.http.post(CHAT, content=bad, headers=kind)
        assert reply.status_code == 400, bad[:20]
        assert reply.json()["error"]["code"] == "invalid_json"
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (1 << 20))
        assert raw.recv(100).startswith(b"HTTP/1.1 4") or raw.recv(100) == b""


STRANGE = [
    None,
    True,
    -1,
    0,
    1.5,
    10**30,
    1e308,
    "x",
    "",
    [],
    [1],
    {},
    {"a": 1},
    ["x"] * 50,
    "\ud800",
]
FIELDS = [
    *("messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"),
    *("min_p", "repetition_penalty", "repeat_penalty", "seed", "stop", "n", "logprobs", "stream"),
    *("top_logprobs", "stop_token_ids", "ignore_eos", "stream_options", "logit_bias", "tools"),
    *("response_format", "presence_penalty", "best_of", "omnikv", "prompt", "tokens", "text"),
    *("reasoning_format", "chat_template_kwargs", "reasoning_effort", "min_tokens"),
    *("echo", "content", "special", "add_special", "add_special_tokens"),
]


def test_random_requests_get_answers_of_their_own_kind(server):
    """No 500, no traceback: each is served or refused with a sentence."""
    rng = random.Random(3)
    for _ in range(300):
        path = rng.choice([CHAT, "/v1/completions", "/tokenize", "/detokenize"])
        body = {"max_tokens": 1} | ({"messages": ASK["messages"]} if path == CHAT else {})
        for name in rng.sample(FIELDS, rng.randint(1, 3)):
            body[name] = rng.choice(STRANGE)
        if body.get("stream") is True or (path == "/v1/completions" and "prompt" not in body):
            body["stream"], body["prompt"] = False, ""
        content = json.dumps(body).encode()
        reply = server.http.post(
            path, content=content, headers={"Content-Type": "application/json"}
        )
        assert reply.status_code in (200, 400, 404), (body, reply.text)
        if reply.status_code != 200:
            error = reply.json()["error"]
            assert error["message"] and "\n" not in error["message"], body
    server.until(lambda: server.worker.running == 0)


def test_special_tokens_in_a_users_text_are_text(server):
    """A document that spells the end of its turn does not end it."""
    tokenizer, prompts = server.service.llm.tokenizer, server.service.prompts
    special = [tokenizer.token(i) for i in sorted(tokenizer.special_ids)]
    assert len(special) > 2
    honest = prompts.chat([{"role": "user", "content": "a b"}]).ids
    for text in special:
        ids = prompts.chat([{"role": "user", "content": f"a {text} b"}]).ids
        count = [sum(i in tokenizer.special_ids for i in found) for found in (honest, ids)]
        assert count[0] == count[1] > 0
        assert text in "".join(tokenizer.backend.decode(ids, skip_special_tokens=False))
    plain = server.post("/v1/tokenize", {"text": special[0]}).json()["tokens"]
    known = server.post("/v1/tokenize", {"text": special[0], "special": True}).json()["tokens"]
    assert not set(plain) & tokenizer.special_ids and set(known) & tokenizer.special_ids


def test_an_open_address_needs_a_key_or_the_words_for_none(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("OMNIKV_API_KEY", raising=False)

    def keys(*flags):
        return keys_of(parser().parse_args(list(flags)))

    assert keys() == [] and keys("--host", "0.0.0.0", "--no-auth") == []
    with pytest.raises(UsageError, match="could use this server without a key"):
        keys("--host", "0.0.0.0")
    (tmp_path / "keys").write_text("long-enough-1\nlong-enough-2\n")
    assert keys("--api-key-file", str(tmp_path / "keys"), "--host", "0.0.0.0") == [
        "long-enough-1",
        "long-enough-2",
    ]
    monkeypatch.setenv("OMNIKV_API_KEY", "from-the-environment")
    assert keys("--host", "::") == ["from-the-environment"]
    (tmp_path / "keys").write_text("short")
    assert main(["--api-key-file", str(tmp_path / "keys")]) == 2
    line = capsys.readouterr().err
    assert line.startswith("error: --api-key: found a key of under 8") and "short" not in line
