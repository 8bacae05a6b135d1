"""A server over the shipped model, in this process, on a port of its own."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import httpx
import openai
import uvicorn

from engine import LLM, OmniKV
from engine.serve.app import make_app
from engine.serve.guards import LOOPBACK, Guard
from engine.serve.http.connections import Limits, bounded
from engine.serve.service import Service, Settings
from tests.builders import POCKET
from tests.clocks import HeldClock
from tests.engine.serve.browser import tab


class Running:
    """A server and its clients."""

    def __init__(self, service: Service, protocol: type, port: int) -> None:
        self.protocol = protocol
        self.service, self.worker, self.url = service, service.worker, f"http://127.0.0.1:{port}"
        self.clock = service.clock
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def post(self, path: str, body: object = None, **more: object) -> httpx.Response:
        return self.http.post(path, json=body, **more)

    def until(self, true, seconds: float = 20.0) -> None:
        """Wait until `true()`."""
        end = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < end, "it did not come to be"
            time.sleep(0.01)


@contextlib.contextmanager
def serving(
    llm, keys=(), hosts=LOOPBACK, most=1 << 20, cache=None, load=True, limits=None, bodies=None,
    clock=None, **settings,
):  # fmt: skip
    """A Running server of `llm`. Its streams get signs of life as its clock says: none while that
    stands still.
    """
    clock = clock or HeldClock()
    service = Service(llm, Settings("pocket", **settings), cache, clock)
    app = make_app(service, Guard(keys, hosts, most, bodies))
    protocol = bounded(limits or Limits())
    config = uvicorn.Config(app, port=0, http=protocol, log_level="error", access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    if load:
        service.load()
    running = Running(service, protocol, server.servers[0].sockets[0].getsockname()[1])
    try:
        yield running
    finally:
        running.http.close()
        running.openai.close()
        service.stop(5.0)
        server.should_exit = True
        thread.join(60.0)
        assert not thread.is_alive(), "the server does not end"


@pytest.fixture(scope="session")
def pocket():
    """The shipped model, with a small context."""
    return LLM(str(POCKET), max_context=4096, threads=1, chunk=128, load=False)


@pytest.fixture(scope="session")
def server(pocket):
    with serving(pocket, slots=3, waiting=4) as running:
        yield running


@pytest.fixture(scope="module")
def sparse():
    method = OmniKV(filter_layers=(1, 4), wait_layers=1, tokens=64, dense_below=0)
    llm = LLM(POCKET, method=method, max_context=2048, threads=1, chunk=128, load=False)
    with serving(llm, slots=2, clock=HeldClock(step=1.0)) as running:
        yield running


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    with tab(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.fixture
def page(chromium, sparse):
    """The page of the sparse server, connected; whatever its scripts or its policy report fails."""
    chromium.look(1200, 760)
    chromium.open(sparse.url)
    chromium.until("state.model !== null")
    yield chromium
    assert chromium.errors == []
