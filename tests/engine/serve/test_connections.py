"""Clients that send nothing, stop in the middle, never read, or close one side only."""

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time

import pytest

from engine.base.errors import EngineError
from engine.serve.http import connections, listening
from engine.serve.http.connections import Limits
from tests.builders import ROOT
from tests.engine.serve.conftest import serving

ASK = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@contextlib.contextmanager
def link(server):
    """A connection."""
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as made:
        made.settimeout(20)
        yield made


def request(**body):
    content = json.dumps({"prompt": "The sky is", "temperature": 0, **body}).encode()
    return ASK + b"Content-Length: %d\r\n\r\n" % len(content) + content


def rest(made):
    """All bytes until the server closes."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := made.recv(65536):
            data += part
    return data


@pytest.fixture(scope="module")
def strict(pocket):
    """A server with little patience for 8 connections."""
    with serving(pocket, slots=2, limits=Limits(8, 0.6, 1.5)) as running:
        yield running


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HTTP/1.1\r\nHost: lo",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nG",
        b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n12",
    ],
)
def test_a_connection_without_whole_headers_is_closed(strict, sent):
    """Also one whose next request has begun, or whose body nobody wants: uvicorn's limit between
    two requests ends at the first byte.
    """
    with link(strict) as made:
        made.sendall(sent)
        made.settimeout(8)
        assert (b"HTTP/1.1" in rest(made)) == (b"\r\n\r\n" in sent)


def test_a_byte_now_and_then_buys_no_time(strict):
    with link(strict) as made:
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - began < 15:
                made.sendall(b"G")
                time.sleep(0.1)


def test_the_longest_idle_makes_place_for_a_newcomer(strict):
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(link(strict)) for _ in range(40)]
        with link(strict) as made:
            made.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert rest(made).startswith(b"HTTP/1.1 200")
        idle[0].settimeout(5)
        assert rest(idle[0]) == b""


def test_where_all_are_busy_a_newcomer_is_refused(strict):
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            made = stack.enter_context(link(strict))
            made.sendall(ASK + b"Content-Length: 100\r\n\r\n{")
        time.sleep(0.3)
        with link(strict) as made:
            assert rest(made).startswith(b"HTTP/1.1 503")
    strict.until(lambda: strict.http.get("/health").status_code == 200)


def test_a_body_that_stops_is_given_up(pocket, monkeypatch):
    monkeypatch.setattr("engine.serve.guards.STALL_SECONDS", 0.5)
    with serving(pocket) as server, link(server) as made:
        made.sendall(ASK + b"Content-Length: 100\r\n\r\n{")
        assert rest(made).startswith(b"HTTP/1.1 408")


def test_bodies_that_are_not_whole_take_bounded_memory(pocket, monkeypatch):
    """The one that has been at it for the longest is given up first."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(pocket, bodies=3000))
        slow = [stack.enter_context(link(server)) for _ in range(5)]
        for made in slow:
            made.sendall(ASK + b"Content-Length: 2000\r\n\r\n{" + b" " * 900)
            time.sleep(0.1)
        assert rest(slow[0]).startswith(b"HTTP/1.1 429")
        assert rest(slow[1]).startswith(b"HTTP/1.1 429")
        assert server.post("/v1/tokenize", {"text": "a"}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_who_closes_one_side_gets_the_answer(server, stream):
    with link(server) as made:
        made.sendall(request(max_tokens=3, stream=stream))
        made.shutdown(socket.SHUT_WR)
        data = rest(made)
        assert b"HTTP/1.1 200" in data and b'"finish_reason":' in data.replace(b": ", b":"), data


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", "The grass is green. " * 180])
def test_who_closes_both_ends_the_work(server, stream, prompt):
    """A stream learns it by writing: also while a long prompt is read, a comment now and then."""
    with server.clock.stepping(1.0), link(server) as made:
        made.sendall(request(prompt=prompt, max_tokens=3000, ignore_eos=True, stream=stream))
        server.until(lambda: server.worker.running == 1)
        made.close()
        server.until(lambda: server.worker.running == 0, 5)


def test_an_answer_that_nobody_takes_is_given_up(strict):
    """Its connection too, which uvicorn would keep as long as the client likes."""
    with link(strict) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        made.sendall(request(max_tokens=4000, ignore_eos=True, stream=True, logprobs=5))
        strict.until(lambda: strict.worker.running == 1)
        strict.until(lambda: strict.worker.running == 0, 60)
        watch = strict.protocol.watch
        strict.until(lambda: len(watch.held) <= 1, 10)  # the test's own client


# ---------------------------------------------------------------- the port and descriptors


def test_a_taken_port_is_one_line_before_anything_is_loaded(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "engine.serve", "--model", str(tmp_path), "--port"]
        found = subprocess.run([*command, str(port)], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 1 and found.stdout == ""
    line = found.stderr.rstrip("\n")
    assert line.startswith(f"error: port {port} is taken: --port ") and "\n" not in line


def test_listening_on_a_name_takes_all_of_its_addresses():
    links = listening.listen("localhost", 0)
    try:
        assert len({made.getsockname()[1] for made in links}) == 1
        with pytest.raises(EngineError, match=r"^port \d+ is taken: --port \d+$"):
            listening.listen("localhost", links[0].getsockname()[1])
    finally:
        for made in links:
            made.close()
    with pytest.raises(EngineError, match="^--host no.such.host.invalid: not an address"):
        listening.listen("no.such.host.invalid", 0)


def test_the_limit_of_open_files_is_raised_and_leaves_some(monkeypatch):
    limits = {"now": (1024, 4096)}

    def set_limit(which, value):
        limits["now"] = value

    monkeypatch.setattr(resource, "getrlimit", lambda which: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    assert listening.places(1000) == 1000 and limits["now"] == (4096, 4096)
    limits["now"] = (1024, 1024)
    assert listening.places(1000) == 1024 - listening.SPARE
    limits["now"] = (64, 64)
    assert listening.places(1000) == 32


def test_a_connection_that_cannot_be_accepted_is_said_once():
    said, passed = [], []

    class Loop:
        def default_exception_handler(self, context):
            passed.append(context)

    once, error = listening.Once(said.append), OSError(24, "Too many open files")
    for _ in range(2048):
        once(Loop(), {"message": "socket.accept() out of system resource", "exception": error})
    once(Loop(), {"message": "something else", "exception": error})
    assert len(said) == len(passed) == 1 and "Too many open files" in said[0]


def test_many_idle_connections_under_a_small_limit_stop_nobody(tmp_path):
    """1,024 files in all, as many systems allow, and 1,100 connections that send nothing."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "engine.serve", "--port", "0", "--ctx", "1K", "--slots", "1"]
    environment = {k: v for k, v in os.environ.items() if k != "OMNIKV_API_KEY"}
    with open(log, "wb") as said:
        process = subprocess.Popen(
            ["sh", "-c", 'ulimit -n 1024; exec "$@"', "sh", *command],
            cwd=ROOT, stderr=said, env=environment,
        )  # fmt: skip
    try:
        end = time.monotonic() + 300
        while " is ready: " not in log.read_text():
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        port = int(log.read_text().split("/v1,")[0].rpartition(":")[2])
        length = len(log.read_text())
        with contextlib.ExitStack() as stack:
            raise_own_limit()
            for _ in range(1100):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            for _ in range(3):
                with socket.create_connection(("127.0.0.1", port), timeout=20) as made:
                    made.sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
                    assert rest(made).startswith(b"HTTP/1.1 200")
        assert len(log.read_text()) - length < 500, log.read_text()
    finally:
        process.kill()
        process.wait()


def raise_own_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1500:
        pytest.skip("this machine allows too few open files")
    if soft < 1500:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1500, hard))


def test_the_limits_are_those_of_the_documents():
    text = (ROOT / "docs/SERVER.md").read_text(encoding="utf-8")
    limits = Limits()
    assert f"at most {limits.connections:,} connections" in text
    assert f"whole within {limits.header_seconds:g} seconds" in text
    assert f"{connections.FEW >> 10} KiB in {limits.write_seconds:g} seconds" in text
