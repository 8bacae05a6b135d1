"""What others drive a server by: gauges under the names that Kubernetes' inference gateway reads,
whether it is ready, whether it lives, and how it ends.

Stops: a queue that no gauge shows, a gauge that stays behind, a server called ready while it loads
or ends, one called alive whose model's thread has ended, a new request that waits for an end or
finds nobody, an answer under way that is cut by a signal.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.builders import ROOT
from tests.engine.serve.conftest import serving
from tests.engine.serve.test_facts import figures

ASKED = {"messages": [{"role": "user", "content": "Open the red door"}], "temperature": 0}
LONG = {**ASKED, "max_tokens": 3000, "stream": True, "ignore_eos": True}
CHAT = "/v1/chat/completions"
LABEL = '{model_name="pocket"}'


@pytest.fixture(scope="module")
def one(pocket):
    """A server of one slot."""
    with serving(pocket, slots=1, waiting=8) as running:
        yield running


def gauges(server):
    found = figures(server)
    names = "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"
    return [found[f"vllm:{name}{LABEL}"] for name in names]


@pytest.mark.parametrize("waiting", [0, 1, 5])
def test_the_gauges_follow_a_load(one, waiting):
    """waiting 0 is the control: where nobody waits, nobody is shown to."""
    assert gauges(one) == [0, 0, 0]
    with ThreadPoolExecutor(max(1, waiting)) as pool:
        with one.http.stream("POST", CHAT, json=LONG) as reply:
            lines = reply.iter_lines()  # held: dropped, it would end the reply
            next(lines)
            short = {**ASKED, "max_tokens": 2}
            others = [pool.submit(one.post, CHAT, short) for _ in range(waiting)]
            one.until(lambda: gauges(one)[1] == waiting)
            running, queued, used = gauges(one)
            assert (running, queued) == (1, waiting) and 0 < used < 1
            assert figures(one)["omnikv_requests_waiting"] == waiting
        assert [other.result().status_code for other in others] == [200] * waiting
    one.until(lambda: gauges(one) == [0, 0, 0])


def test_prefix_hits_and_pieces(one):
    before = figures(one)
    new = {"messages": [{"role": "user", "content": "A lamp stands in the garden"}]}
    usage = [one.post(CHAT, {**new, "max_tokens": 1}).json()["usage"] for _ in range(3)]
    now = figures(one)
    held = sum(row["prompt_tokens_details"]["cached_tokens"] for row in usage)
    asked = sum(row["prompt_tokens"] for row in usage)
    for name, count in (("queries", asked), ("hits", held)):
        row = f"vllm:prefix_cache_{name}_total{LABEL}"
        assert now[row] - before[row] == count
    assert 0 < held < asked
    pieces = [name for name in now if name.startswith("vllm:cache_config_info")]
    (sizes,) = [dict(re.findall(r'(\w+)="([^"]*)"', name)) for name in pieces]
    assert int(sizes["block_size"]) * int(sizes["num_gpu_blocks"]) == 4096 and now[pieces[0]] == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_ready_and_alive_are_two_things(pocket):
    def states(server):
        found = [server.http.get(path) for path in ("/readyz", "/health", "/livez")]
        return [(reply.status_code, reply.json()["status"]) for reply in found]

    with serving(pocket, load=False, slots=1) as server:
        assert states(server) == [(503, "loading"), (503, "loading"), (200, "loading")]
        refused = server.post(CHAT, ASKED)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        server.service.load()
        assert states(server) == [(200, "ok")] * 3
        assert server.post(CHAT, {**ASKED, "max_tokens": 1}).status_code == 200
        server.service.announce_end()
        assert states(server) == [(503, "ending"), (503, "ending"), (200, "ending")]
        refused = server.post(CHAT, ASKED)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
        assert refused.json()["error"]["code"] == "shutting_down"
        assert refused.headers["connection"] == "close"
    with serving(pocket, slots=1) as server:
        server.worker.between(lambda: 1 / 0)  # what must not happen
        server.until(lambda: not server.worker.alive)
        assert states(server) == [(503, "failed")] * 3


def test_a_signal_lets_answers_end_and_sends_new_ones_away(tmp_path):
    """In a process of its own: a signal is the process's."""
    command = [sys.executable, "-m", "engine.serve", "--port", "0", "--slots", "2", "--ctx", "4K"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen([*command, "--grace", "60"], cwd=ROOT, stderr=log, env=quiet())
        try:
            while " is ready: " not in (said := (tmp_path / "log").read_text()):
                assert process.poll() is None, said
                time.sleep(0.05)
            url = said.split("ready: ")[1].split("/v1,")[0]
            # nobody reads it on for a while: 15 MB fit into no buffer, so it is under way meanwhile
            body = {**LONG, "max_tokens": 2500, "logprobs": True, "top_logprobs": 20}
            with httpx.stream("POST", f"{url}{CHAT}", json=body, timeout=60) as reply:
                lines = reply.iter_lines()
                first = next(line for line in lines if line.startswith("data: "))
                process.send_signal(signal.SIGTERM)
                ended = None
                while ended is None or ended.status_code == 200:
                    ended = httpx.get(f"{url}/readyz")
                    time.sleep(0.02)
                assert (ended.status_code, ended.json()) == (503, {"status": "ending"})
                assert httpx.get(f"{url}/livez").status_code == 200
                for _ in range(3):  # over connections of their own: it still listens
                    refused = httpx.post(f"{url}{CHAT}", json=ASKED)
                    assert refused.status_code == 503 and refused.headers["retry-after"] == "2"
                assert process.poll() is None
                data = [first, *(line for line in lines if line.startswith("data: "))]
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
    assert data[-1] == "data: [DONE]"
    chunks = [json.loads(line[6:]) for line in data[:-1]]
    written = [c for c in chunks if c["choices"] and c["choices"][0].get("logprobs")]
    assert sum(len(c["choices"][0]["logprobs"]["content"]) for c in written) == 2500
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert (tmp_path / "log").read_text().endswith("s to end\nstopped\n")


def quiet():
    return {name: value for name, value in os.environ.items() if name != "OMNIKV_API_KEY"}
