"""Replicas of the shipped model under Ray Serve: who answers a second question about a document,
and what clients see when a replica is killed.

python -m tests.programs.ray_replicas --replicas 2 --clients 8 --rounds 3

Every client has a document of its own and asks two questions about it, one after the other, all
clients at once; a round has new documents. That is done under the router that goes by prefixes and,
as a control, under one that draws a replica by lot. Counted are second questions that the replica
answered which had read the document, and the tokens of them that were not read again (`usage`).
Then a replica gets SIGKILL while all clients wait for an answer; OpenAI's client tries again as it
does by itself. And once more while all of them read streams: a stream that breaks off must end with
an error, and its client asks again. Exit code 0, or 1 where a second question went elsewhere under
the router by prefixes, where the control reused as many tokens, or where a client got no answer.

Ray is no requirement of the engine: pip install '.[ray]'.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import ray
import torch
from ray import serve
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from engine.fleet.ray_serve import application
from tools.bench import header

PORT = 18431
APP = f"omnikv-{os.getpid()}"
WORDS = "door key lamp stone river tower garden letter window boat clock table bridge road".split()


class Drawn(RequestRouter):
    """The control: any replica, by lot."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        order = random.sample(candidate_replicas, len(candidate_replicas))
        return [[one] for one in order]


@dataclass
class Answer:
    """What a client got."""

    replica: str
    prompt: int
    cached: int
    text: str


class Clients:
    """Clients with a document each. refused: replies with an error, by status. broken: streams that
    ended with an error.
    """

    def __init__(self, count: int, seed: int, words: int) -> None:
        draw = random.Random(seed)
        self.documents = [
            f"Book {seed}.{n}. " + " ".join(draw.choices(WORDS, k=words)) for n in range(count)
        ]
        self.refused: Counter[int] = Counter()
        self.broken = 0
        self._lock = threading.Lock()
        self._http = httpx.Client(timeout=180, event_hooks={"response": [self._count]})
        url = f"http://127.0.0.1:{PORT}/v1"
        self._openai = openai.OpenAI(
            base_url=url, api_key="none", max_retries=8, http_client=self._http
        )

    def _count(self, reply: httpx.Response) -> None:
        if reply.status_code != 200:
            with self._lock:
                self.refused[reply.status_code] += 1

    def ask(self, number: int, question: str, tokens: int) -> Answer:
        """One question of one client."""
        content = f"{self.documents[number]}\n\n{question}"
        raw = self._openai.chat.completions.with_raw_response.create(
            model="pocket",
            messages=[{"role": "user", "content": content}],
            max_tokens=tokens,
            temperature=0,
            extra_body={"ignore_eos": True},
        )
        found = raw.parse()
        assert found.usage is not None and found.usage.prompt_tokens_details is not None
        cached = found.usage.prompt_tokens_details.cached_tokens or 0
        text = found.choices[0].message.content or ""
        return Answer(raw.headers["x-replica"], found.usage.prompt_tokens, cached, text)

    def read(self, number: int, question: str, tokens: int) -> Answer:
        """The same as a stream, asked for again where it breaks off."""
        for _ in range(8):
            content = f"{self.documents[number]}\n\n{question}"
            stream = self._openai.chat.completions.create(
                model="pocket",
                messages=[{"role": "user", "content": content}],
                max_tokens=tokens,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            text, usage = "", None
            try:
                for chunk in stream:
                    text += "".join(choice.delta.content or "" for choice in chunk.choices)
                    usage = chunk.usage or usage
            except openai.APIError:
                with self._lock:
                    self.broken += 1
                time.sleep(1.0)
                continue
            assert usage is not None, "a stream broke off without a word"
            who, held = stream.response.headers["x-replica"], usage.prompt_tokens_details
            return Answer(who, usage.prompt_tokens, (held and held.cached_tokens) or 0, text)
        raise AssertionError("eight streams broke off")

    def all(self, work: Callable[[int], Any]) -> list[Any]:
        """What `work` returns for every client, all at once."""
        with ThreadPoolExecutor(len(self.documents)) as pool:
            return list(pool.map(work, range(len(self.documents))))


def replicas_of(app: str) -> list[int]:
    """Processes of the replicas of an application, which Ray names so."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (
                (folder / "cmdline")
                .read_bytes()
                .startswith(f"ray::ServeReplica:{app}:Rep".encode())
            ):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def started(args: argparse.Namespace, router: Any) -> str:
    """An application under a router; its name."""
    name = f"{APP}-{router if isinstance(router, str) else router.__name__}"
    flags = (
        f"--alias pocket --ctx 8K --slots {2 * args.clients} --queue 64 --threads 1 {args.flags}"
    )
    serve.run(
        application({"flags": flags, "replicas": args.replicas, "cpus": 1, "router": router}),
        name=name,
        route_prefix="/",
    )
    return name


def routed(args: argparse.Namespace, label: str) -> tuple[int, int, list[str]]:
    """(second questions at the replica that had read, tokens not read again, answers)."""
    same = cached = prompt = 0
    texts, shares = [], Counter()
    for number in range(args.rounds):
        clients = Clients(args.clients, args.seed + number, args.words)

        def both(client: int, clients: Clients = clients) -> tuple[Answer, Answer]:
            first = clients.ask(client, "Which word is the first?", 8)
            return first, clients.ask(client, "And which word comes after the third?", 8)

        for first, second in clients.all(both):
            same += first.replica == second.replica
            cached, prompt = cached + second.cached, prompt + second.prompt
            shares[first.replica] += 1
            texts += [first.text, second.text]
    asked = args.rounds * args.clients
    print(
        f"{label}: {same} of {asked} second questions went to the replica that had read the "
        f"document; {cached:,} of their {prompt:,} tokens were not read again "
        f"({cached / prompt:.1%}); documents by replica {sorted(shares.values())}",
        flush=True,
    )
    return same, cached, texts


def killed(args: argparse.Namespace, app: str, stream: bool) -> list[str]:
    """Kill a replica while all clients wait, or read streams; what was wrong."""
    clients, faults = Clients(args.clients, args.seed + 1000 + stream, args.words), []
    first = clients.all(lambda client: clients.ask(client, "Which word is the first?", 8))
    victim = random.Random(args.seed).choice(replicas_of(app))
    timer = threading.Timer(args.moment, os.kill, (victim, signal.SIGKILL))
    timer.start()
    began = time.monotonic()
    ask = clients.read if stream else clients.ask

    def again(client: int) -> Answer | Exception:
        try:
            return ask(client, "And which word comes after the third?", args.tokens)
        except (openai.OpenAIError, AssertionError) as error:
            return error

    second = clients.all(again)
    timer.join()
    seconds = time.monotonic() - began
    lost = [answer for answer in second if isinstance(answer, Exception)]
    moved = sum(
        isinstance(new, Answer) and new.replica != old.replica for old, new in zip(first, second)
    )
    tried = [f"{count} replies of {status}" for status, count in clients.refused.items()]
    tried += [f"{clients.broken} streams that ended with an error"] if clients.broken else []
    print(
        f"a replica killed {args.moment:g} s into {args.clients} "
        f"{'streams' if stream else 'answers'} of {args.tokens} tokens: "
        f"{args.clients - len(lost)} of {args.clients} answered, {moved} by another replica, "
        f"after {' and '.join(tried) or 'no refusals'}, in {seconds:.1f} s",
        flush=True,
    )
    if lost:
        faults.append(f"no answer: {lost[0]}")
    if not tried:
        faults.append("the kill came too late: nobody noticed")
    until = time.monotonic() + 120
    while len(replicas_of(app)) < args.replicas and time.monotonic() < until:
        time.sleep(0.5)
    third = clients.all(lambda client: clients.ask(client, "Name the last word.", 8))
    held = sum(answer.cached > answer.prompt // 2 for answer in third)
    print(f"afterwards {held} of {args.clients} third questions found their document read")
    return faults + ([] if held == args.clients else ["a document was read twice more"])


def main(arguments: list[str] | None = None) -> int:
    """Run both routers and the kill."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--words", type=int, default=2000, help="of a document")
    parser.add_argument("--tokens", type=int, default=400, help="of an answer during the kill")
    parser.add_argument("--moment", type=float, default=0.5, help="seconds before the kill")
    parser.add_argument("--flags", default="", help="further ones of python -m engine.serve")
    args = parser.parse_args(arguments)
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    print(
        f"{header.hardware(torch.device('cpu'))}; load {load}; commit {header.commit()}; Ray "
        f"{ray.__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    ray.init(num_cpus=args.replicas + 2, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": PORT})
    faults = []
    try:
        app = started(args, "prefix")
        same, cached, texts = routed(args, "by prefixes")
        for stream in (False, True):
            faults += killed(args, app, stream)
        serve.delete(app)
        app = started(args, Drawn)
        _, drawn, others = routed(args, "by lot")
        serve.delete(app)
        equal = sum(one == other for one, other in zip(texts, others))
        print(f"{equal} of {len(texts)} answers are the same under both")
        if same < args.rounds * args.clients:
            faults.append("a second question went elsewhere")
        if drawn >= cached:
            faults.append("the control reused as much")
    finally:
        serve.shutdown()
        ray.shutdown()
    print("; ".join(faults) or "no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
