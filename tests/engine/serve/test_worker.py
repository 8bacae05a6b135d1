"""Several sessions take turns on one thread, and a client that leaves takes its work along.

Stops: an answer that depends on its neighbours, a stream that waits for another's whole prompt, a
slot that is never freed, a queue without end, a shutdown that hangs.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from engine import OmniKV, SamplingParams
from engine.base.errors import Busy, WorkerClosed
from engine.batch.mailbox import UNREAD, Mailbox
from engine.batch.worker import Ended, Reading
from engine.saved.cache import BlockCache
from engine.serve.service import client_error
from engine.serve.worker.worker import HttpJob, HttpWorker, Wrote
from tests.builders import ROOT, random_ids, tiny_llm

SPARSE = OmniKV(filter_layers=(1, 4), tokens=24, dense_below=0)


class Client:
    """A job and its events."""

    def __init__(self, worker, ids, tokens=6, full=bool, **settings):
        self.events, self.ended = [], threading.Event()
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, **settings)
        self.job = HttpJob(list(ids), params, self.take, full=full)
        worker.submit(self.job)

    def take(self, event):
        self.events.append(event)
        if isinstance(event, Ended):
            self.ended.set()

    def answer(self):
        assert self.ended.wait(60)
        assert self.events[-1].error is None, self.events[-1]
        return [e.token_id for e in self.events if isinstance(e, Wrote)]

    @property
    def cached(self):
        return next(e.cached for e in self.events if isinstance(e, Reading))


@pytest.fixture(scope="module")
def llm():
    return tiny_llm(SPARSE, backend="reference", max_context=1024)


@pytest.fixture
def worker(llm):
    made = HttpWorker(llm, slots=2, waiting=3)
    made.start()
    yield made
    made.stop(5.0)


def alone(llm, ids, tokens=6):
    with llm.session() as session:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        return [p.token_id for p in session.generate(list(ids), params)]


class Dawdler(Client):
    """One that takes no events until it is let."""

    def __init__(self, worker, ids, tokens):
        self.behind = True
        super().__init__(worker, ids, tokens, full=lambda: self.behind)

    def wrote(self):
        return sum(isinstance(event, Wrote) for event in list(self.events))


def until(true, seconds=20.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.005)


def test_an_answer_that_nobody_reads_pauses_and_stops_no_other(llm, worker):
    ids = random_ids(30)
    slow = Dawdler(worker, ids, 12)
    until(lambda: worker.paused == 1)
    assert slow.wrote() <= 1 and worker.running == 1
    assert Client(worker, random_ids(40), 20).answer() == alone(llm, random_ids(40), 20)
    assert slow.wrote() <= 1
    slow.behind = False
    assert slow.answer() == alone(llm, ids, 12)
    assert worker.paused == worker.running == 0


def test_a_paused_answer_ends_with_its_client_and_with_its_time(llm):
    worker = HttpWorker(llm, slots=2, waiting=3, timeout=1.0)
    worker.start()
    try:
        leaves, late = Dawdler(worker, random_ids(30), 12), Dawdler(worker, random_ids(31), 12)
        until(lambda: worker.paused == 2)
        leaves.job.gone = True
        assert leaves.ended.wait(20) and late.ended.wait(20)
        assert late.wrote() <= 2 and worker.running == 0
    finally:
        worker.stop(0.0)


def test_paused_answers_give_their_slots_to_those_who_wait(llm, worker, monkeypatch):
    monkeypatch.setattr("engine.serve.worker.worker.YIELD", 0.2)
    slow = [Dawdler(worker, random_ids(n), 12) for n in (30, 31)]
    until(lambda: worker.paused == 2)
    assert Client(worker, random_ids(40), 5).answer() == alone(llm, random_ids(40), 5)
    assert sum(client.ended.is_set() for client in slow) == 1
    worker.stop(0.0)
    assert all(client.ended.wait(20) for client in slow)


def test_a_mailbox_says_when_it_is_full_until_half_of_it_is_read():
    async def run():
        box = Mailbox()
        for number in range(UNREAD):
            assert not box.full()
            box.post(number)
        assert box.full()
        for _ in range(UNREAD // 2):
            assert box.full()
            await box.next(1.0)
        await box.next(1.0)
        assert not box.full()

    asyncio.run(run())


def test_neighbours_change_nothing_and_nobody_waits_for_a_whole_prompt(llm):
    prompts = [random_ids(n, seed=n) for n in (60, 500, 130, 300)]
    wanted = [alone(llm, ids) for ids in prompts]
    worker = HttpWorker(llm, slots=4)
    order = []
    clients = [Client(worker, ids) for ids in prompts]
    for number, client in enumerate(clients):

        def take(event, client=client, number=number, before=client.job.post):
            order.append((number, type(event)))
            before(event)

        client.job.post = take
    worker.start()
    try:
        assert [client.answer() for client in clients] == wanted
        ends = {n: order.index((n, Ended)) for n in range(4)}
        assert ends[0] < ends[2] < ends[1]  # the short ones were through before the long one
        # between two tokens of the first, at most one chunk of all others was read
        mine = [i for i, (n, kind) in enumerate(order) if n == 0 and kind is Wrote]
        for left, right in zip(mine, mine[1:]):
            assert sum(kind is Reading for _, kind in order[left:right]) <= 1
    finally:
        worker.stop(5.0)
    assert worker.slots.slots == []


def test_a_common_beginning_is_read_once(llm, worker):
    ids = random_ids(400, seed=1)
    first = Client(worker, ids)
    tokens = first.answer()
    assert first.cached == 0 and tokens == alone_later(ids)
    again = Client(worker, ids)
    assert again.answer() == tokens and again.cached == 400
    longer = Client(worker, [*ids, *tokens, 5, 6, 7])
    longer.answer()
    assert longer.cached == 400 + len(tokens)
    other = Client(worker, [*ids[:150], *random_ids(80, seed=9)])
    tokens = other.answer()
    assert other.cached == 150  # copied from a session that goes on standing
    assert len(worker.slots.slots) == 2
    fresh = Client(worker, random_ids(90, seed=4))
    fresh.answer()
    assert fresh.cached <= 1 and len(worker.slots.slots) == 2


def alone_later(ids):
    """What a fresh session says: run by the worker, which owns the model."""
    other = HttpWorker(tiny_llm(SPARSE, backend="reference", max_context=1024), slots=1)
    other.start()
    try:
        return Client(other, ids).answer()
    finally:
        other.stop(5.0)


def test_one_that_leaves_frees_its_slot_in_the_middle_of_anything(llm, worker):
    reading = Client(worker, random_ids(900, seed=2))
    while not any(isinstance(e, Reading) and e.done > 0 for e in reading.events):
        time.sleep(0.001)
    reading.job.gone = True
    writing = Client(worker, random_ids(20, seed=3), tokens=900)
    while not any(isinstance(e, Wrote) for e in writing.events):
        time.sleep(0.001)
    writing.job.gone = True
    for client in (reading, writing):
        assert client.ended.wait(30)
    done = [e for e in reading.events if isinstance(e, Reading)]
    assert done[-1].done < 900
    assert not any(slot.busy for slot in worker.slots.slots)
    resumed = Client(worker, random_ids(900, seed=2))
    assert len(resumed.answer()) == 6
    assert resumed.cached == done[-1].done  # what was read stays read


def test_the_queue_is_bounded_and_ending_is_orderly(llm):
    worker = HttpWorker(llm, slots=1, waiting=2)
    # one for the slot, two that wait for it
    waiting = [Client(worker, [1, 2, 3], tokens=4) for _ in range(3)]
    with pytest.raises(Busy) as full:
        Client(worker, [1])
    refused = client_error(full.value)
    assert refused.status == 429 and refused.headers["Retry-After"]
    worker.start()
    assert [len(c.answer()) for c in waiting] == [4, 4, 4]
    long = Client(worker, random_ids(20), tokens=900)
    while not any(isinstance(e, Wrote) for e in long.events):
        time.sleep(0.001)
    queued = Client(worker, [1, 2, 3])
    worker.stop(0.0)
    assert long.events[-2].finish == "interrupted" and long.events[-1].error is None
    assert client_error(queued.events[-1].error).status == 503
    with pytest.raises(WorkerClosed):
        Client(worker, [1])
    assert not worker._thread.is_alive()


def test_what_was_read_is_found_after_a_restart(llm, tmp_path):
    ids = random_ids(600, seed=8)
    answers, cached = [], []
    for _ in range(2):
        worker = HttpWorker(llm, slots=1, cache=BlockCache(tmp_path))
        worker.start()
        client = Client(worker, ids)
        answers.append(client.answer())
        cached.append(client.cached)
        worker.stop(5.0)
    assert cached == [0, 512] and answers[0] == answers[1]


# ---------------------------------------------------------------- over HTTP


LONG = {
    "messages": [{"role": "user", "content": "door " * 1500}],
    "max_tokens": 1500,
    "ignore_eos": True,
    "temperature": 0,
}


def test_a_client_that_leaves_ends_its_work(server):
    for body in ({**LONG, "stream": True}, LONG):
        with pytest.raises(httpx.ReadTimeout):
            with server.http.stream(
                "POST", "/v1/chat/completions", json=body, timeout=0.7
            ) as reply:
                for line in reply.iter_lines():
                    if line.startswith("data"):
                        raise httpx.ReadTimeout("enough")
        server.until(lambda: server.worker.running == 0)
    assert not any(slot.busy for slot in server.worker.slots.slots)


def test_a_stream_tells_how_far_the_reading_is(server):
    """Comments before the first byte of the answer, which clients pass over."""
    body = {**LONG, "messages": [{"role": "user", "content": "gate " * 900}], "max_tokens": 1}
    with (
        server.clock.stepping(server.service.settings.ping),
        server.http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as reply,
    ):
        lines = [line for line in reply.iter_lines() if line]
    first = next(i for i, line in enumerate(lines) if line.startswith("data"))
    said = [line for line in lines[:first] if line.startswith(": reading ")]
    assert len(said) >= 2 and lines[-1] == "data: [DONE]"
    told = [re.fullmatch(r": reading (\d+)/(\d+)(?:, (\d+\.\d) s left)?", line) for line in said]
    assert all(0 <= int(one[1]) <= int(one[2]) for one in told)
    # the time left once there is a chunk to go by; none at the end
    assert [one[3] is not None for one in told] == [one[1] != told[0][1] for one in told]
    assert told[-1][1] != told[-1][2] or told[-1][3] == "0.0"
    for line in lines[first:-1]:
        assert line.startswith(":") or json.loads(line.removeprefix("data: "))


def test_signs_of_life_are_events_where_the_interface_has_them(server):
    """Those of Anthropic's and OpenAI's own servers; the official client passes over OpenAI's."""
    body = {"model": "pocket", "max_tokens": 1, "stream": True, "temperature": 0}
    body["messages"] = [{"role": "user", "content": "ladder " * 900}]
    with server.clock.stepping(server.service.settings.ping):
        with server.http.stream("POST", "/v1/messages", json=body) as reply:
            names = [line[7:] for line in reply.iter_lines() if line.startswith("event: ")]
        stream = server.openai.responses.create(
            model="pocket", input="stone " * 900, max_output_tokens=1, stream=True
        )
        events = list(stream)
    assert names[0] == "message_start" and names[1] == "ping" and names[-1] == "message_stop"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events].count("keepalive") > 1
    assert events[-1].type in ("response.completed", "response.incomplete")


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT], ids=["TERM", "INT"])
def test_the_program_starts_serves_and_ends_at_a_signal(tmp_path, ending):
    """Also: no prompt in its log, a cut answer has a finish_reason, exit code 0."""
    command = [
        sys.executable,
        "-m",
        "engine.serve",
        "--port",
        "0",
        "--slots",
        "2",
        "--ctx",
        "4K",
        "--grace",
        "1",
    ]
    environment = {**os.environ, "OMNIKV_API_KEY": "a-secret-key"}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [*command, "--cache", str(tmp_path / "c")], cwd=ROOT, env=environment, stderr=log
        )
        try:
            said = ""
            while " is ready: " not in said:
                assert process.poll() is None, said
                time.sleep(0.05)
                said = (tmp_path / "log").read_text()
            url = said.split("ready: ")[1].split(",")[0]
            headers = {"Authorization": "Bearer a-secret-key"}
            body = {**LONG, "messages": [{"role": "user", "content": "sesame"}], "stream": True}
            with httpx.stream(
                "POST", f"{url}/chat/completions", json=body, headers=headers, timeout=60
            ) as reply:
                lines, data = [], 0
                for line in reply.iter_lines():
                    lines.append(line)
                    data += line.startswith("data")  # a comment is none
                    if data == 2 and line.startswith("data"):
                        process.send_signal(ending)
            assert lines[-2] == "data: [DONE]" and '"finish_reason": "' in lines[-4]
            assert process.wait(40) == 0
        finally:
            process.kill()
    said = (tmp_path / "log").read_text()
    assert re.search(r"\nstopping; answers under way have \d+ s to end\nstopped\n$", said), said
    assert "sesame" not in said and "a-secret-key" not in said and "Traceback" not in said
