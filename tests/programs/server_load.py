"""Many clients at once, as they are: most want an answer, some go away in the middle of one, some
read slowly, some send nonsense.

python -m tests.programs.server_load --clients 64 --minutes 10 --seed 0

Every answer that came whole must be the one that the library gives alone; every refusal must be one
that the server means (4xx for nonsense, 429 with Retry-After where its queue is full); resident
memory must stay within 2% of what it was a quarter of the time in; and when all clients have gone,
nothing may run, wait or hold a slot that the next requests do not get. Exit code 0, or 1 with a
line for each fault.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from engine import LLM
from engine.methods.full import Full
from engine.serve.request.prompts import Prompts
from tests.builders import POCKET
from tests.programs.server_kills import CONTEXT, TOKENS, alone, asked, documents, start

SLOTS = 4
FLAGS = (
    f"--port 0 --slots {SLOTS} --queue 16 --ctx {CONTEXT} --method full --chunk 128 --threads 1 "
    "--grace 1"
).split()
GROWTH = 0.02  # of resident memory that is allowed
NONSENSE = (
    "",
    "{",
    "[]",
    "null",
    '{"messages": "hello"}',
    '{"messages": []}',
    '{"messages": [{"role": "nobody", "content": "x"}]}',
    '{"messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
    '{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}',
    '{"messages": [{"role": "user", "content": "x"}], "n": 1000000}',
    '{"messages": [{"role": "user", "content": "x"}], "presence_penalty": 3}',
    '{"messages": [{"role": "user", "content": ' + "[" * 500 + "]" * 500 + "}]}",
    '{"messages": [{"role": "user", "content": "\\ud800"}]}',
)


@dataclass
class Load:
    """A run. expected: answers alone, by document. counts: what was done; wrong: what should not
    have been.
    """

    url: str
    expected: dict[str, str]
    end: float
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def fault(self, words: str) -> None:
        """Note what should not have been, the first thousand times."""
        if len(self.wrong) < 1000:
            self.wrong.append(words)


def body(text: str, **more: Any) -> dict[str, Any]:
    """A request about a document."""
    return {
        "messages": asked(text), "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, **more
    }  # fmt: skip


def refused(load: Load, reply: httpx.Response, rng: random.Random) -> bool:
    """Whether the queue was full, which is waited for; any other refusal is a fault."""
    if reply.status_code == 200:
        return False
    if reply.status_code != 429 or "retry-after" not in reply.headers:
        load.fault(f"status {reply.status_code}: {reply.text[:200]}")
    load.counts["429"] += 1
    time.sleep(rng.uniform(0.2, 2.0))
    return True


def whole_answer(load: Load, client: httpx.Client, rng: random.Random) -> None:
    """An answer in one piece."""
    text = rng.choice(list(load.expected))
    reply = client.post(f"{load.url}/chat/completions", json=body(text))
    if not refused(load, reply, rng):
        compare(load, text, reply.json()["choices"][0]["message"]["content"], "whole")


def streamed(
    load: Load, client: httpx.Client, rng: random.Random, slow: bool = False, leaves: bool = False
) -> None:
    """An answer as it comes. slow: wait between events. leaves: go away after some of them."""
    text, said = rng.choice(list(load.expected)), ""
    stop = rng.randrange(6) if leaves else None
    sent = body(text, stream=True)
    with client.stream("POST", f"{load.url}/chat/completions", json=sent) as reply:
        if reply.status_code != 200:
            reply.read()
            refused(load, reply, rng)
            return
        for number, line in enumerate(reply.iter_lines()):
            if stop is not None and number >= stop:
                load.counts["left"] += 1
                return
            if slow:
                time.sleep(rng.uniform(0.0, 0.3))
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    load.fault(f"a stream ended with {line[:200]}")
                said += "".join(c["delta"].get("content") or "" for c in event.get("choices", ()))
    compare(load, text, said, "slow" if slow else "streamed")


def compare(load: Load, text: str, said: str, kind: str) -> None:
    """Whether an answer is the one that is given alone."""
    load.counts[kind] += 1
    if said != load.expected[text]:
        load.fault(f"{kind}: found {said!r}, expected {load.expected[text]!r}")


def nonsense(load: Load, client: httpx.Client, rng: random.Random) -> None:
    """A body that makes no request, or a piece of one."""
    content = rng.choice([*NONSENSE, json.dumps(body("x"))[: rng.randrange(1, 60)]])
    headers = {"content-type": "application/json"}
    path = rng.choice(["chat/completions", "completions", "messages", "responses", "nowhere"])
    reply = client.post(f"{load.url}/{path}", content=content.encode(), headers=headers)
    load.counts["nonsense"] += 1
    if not 400 <= reply.status_code < 500:
        load.fault(f"{path} {content[:80]!r}: status {reply.status_code}: {reply.text[:120]}")


def one_client(load: Load, seed: int) -> None:
    """Requests until the time is over."""
    rng = random.Random(seed)
    with httpx.Client(timeout=300) as client:
        while time.monotonic() < load.end:
            kind = rng.random()
            try:
                if kind < 0.5:
                    whole_answer(load, client, rng)
                elif kind < 0.7:
                    streamed(load, client, rng)
                elif kind < 0.85:
                    streamed(load, client, rng, leaves=True)
                elif kind < 0.9:
                    streamed(load, client, rng, slow=True)
                else:
                    nonsense(load, client, rng)
            except httpx.HTTPError as error:
                load.fault(f"{type(error).__name__}: {error}")


def gauges(url: str) -> dict[str, float]:
    """The server's figures that have no labels."""
    lines = httpx.get(f"{url.removesuffix('/v1')}/metrics", timeout=60).text.splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if line[0] == "o"
                                                   and "{" not in line)}  # fmt: skip


def settled(load: Load) -> None:
    """All clients have gone: nothing runs or waits, and every slot is there for the next."""
    end = time.monotonic() + 120
    while True:
        now = gauges(load.url)
        if now["omnikv_requests_running"] == now["omnikv_requests_waiting"] == 0:
            break
        if time.monotonic() > end:
            load.fault(f"something runs or waits two minutes after all have gone: {now}")
            return
        time.sleep(0.5)
    parts = [
        Load(load.url, {text: said}, 0.0) for text, said in list(load.expected.items())[:SLOTS]
    ]
    with httpx.Client(timeout=300) as client:
        threads = [
            threading.Thread(target=whole_answer, args=(part, client, random.Random(0)))
            for part in parts
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for part in parts:
        load.wrong += part.wrong
        if part.counts["whole"] != 1:
            load.fault(f"a slot is not there for the next: {dict(part.counts)}")
    if gauges(load.url)["omnikv_slots_held"] > SLOTS:
        load.fault("more slots are held than there are")


def run(folder: Path, clients: int, minutes: float, seed: int, say=print) -> Load:
    """Start a server, load it, look at what is left; the faults are in the result."""
    llm = LLM(str(POCKET), max_context=CONTEXT, threads=1, chunk=128, method=Full())
    prompts = Prompts(llm.tokenizer, llm.config.vocab_size, llm.end_token_ids)
    texts = documents(random.Random(seed), 8)
    expected = {text: alone(llm, prompts, text) for text in texts}
    process, url = start(None, folder / "log", FLAGS)
    try:
        began = time.monotonic()
        load = Load(url, expected, began + 60 * minutes)
        threads = [
            threading.Thread(target=one_client, args=(load, seed * 1000 + number))
            for number in range(clients)
        ]
        for thread in threads:
            thread.start()
        seen: list[int] = []
        for _ in range(8):
            time.sleep(60 * minutes / 8)
            seen.append(resident(process.pid))
            say(f"{time.monotonic() - began:.0f} s: {seen[-1] / 1e6:.1f} MB, {dict(load.counts)}")
        for thread in threads:
            thread.join()
        settled(load)
        seen.append(resident(process.pid))
        say(f"all gone: {seen[-1] / 1e6:.1f} MB")
        # the first seconds fill caches
        if minutes >= 1 and max(seen[1:]) > seen[1] * (1 + GROWTH):
            load.fault(f"memory grew from {seen[1]} to {max(seen[1:])} bytes")
        if process.poll() is not None:
            load.fault(f"the server ended: {(folder / 'log').read_text()[-500:]}")
        return load
    finally:
        process.kill()
        process.wait()


def resident(pid: int) -> int:
    """Bytes of a process that lie in memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def main() -> int:
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        load = run(Path(folder), args.clients, args.minutes, args.seed)
    for line in load.wrong[:20]:
        print(f"wrong: {line}")
    print(f"{dict(load.counts)}; {len(load.wrong)} faults")
    return 1 if load.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
