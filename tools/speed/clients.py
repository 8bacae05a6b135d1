"""Servers of OpenAI's interface, in turns under
the same clients.

In a turn all clients ask one server at once for the continuation of a text of their own, each of
`--tokens` tokens. The table has tokens per second of all clients together, medians: with prompts
that the server has not seen, and with those of the turn before, which it may hold.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from engine.base.errors import EngineError, UsageError
from tools.common.program import progress, say
from tools.speed import harness
from tools.speed.harness import Report, flag

WORDS = "the old lighthouse stood at end of road and nobody knew who had lit its lamp again".split()


def text_of(words: int, seed: int) -> str:
    """A text that no other seed begins with."""
    rng = random.Random(seed)
    return f"Story {seed}. " + " ".join(rng.choice(WORDS) for _ in range(words))


def ask(url: str, text: str, tokens: int) -> dict[str, Any]:
    """The usage of one completion. Raises EngineError where the server refuses it."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=600)
    body = {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"{parts.path}/completions", json.dumps(body), headers)
    reply = connection.getresponse()
    data = reply.read()
    connection.close()
    if reply.status != 200:
        raise EngineError(f"{url}: status {reply.status}: {data[:200]!r}")
    return json.loads(data)["usage"]


def turn(url: str, texts: Sequence[str], tokens: int) -> float:
    """Tokens per second of one client per text."""
    usages: list[dict[str, Any]] = []
    errors: list[Exception] = []

    def client(text: str) -> None:
        try:
            usages.append(ask(url, text, tokens))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=client, args=(text,)) for text in texts]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if errors:
        raise errors[0]
    wrote = sum(usage["completion_tokens"] for usage in usages)
    if wrote != tokens * len(texts):
        raise EngineError(f"{url}: {wrote} tokens, expected {tokens} from each of {len(texts)}")
    return wrote / seconds


def measure(servers: dict[str, str], args: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """{server: {"new" and "held": tokens per second of each turn}}, after a first."""
    first = time.time_ns()  # a server may hold the texts of an earlier run

    def rate(kind: str, name: str, number: int) -> float:
        progress(f"turn {number} of {args.turns}, {kind}, {name}")
        begin = first + number * args.clients
        texts = [text_of(args.words, seed) for seed in range(begin, begin + args.clients)]
        return turn(servers[name], texts, args.tokens)

    kinds = ("new", "held")
    ways = {(kind, name): partial(rate, kind, name) for kind in kinds for name in servers}
    found = harness.in_turns(ways, args.turns)
    say("")
    return {name: {kind: found[kind, name] for kind in kinds} for name in servers}


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """A Markdown table; ratios to the last server."""
    last, rows = list(found.values())[-1], []
    for name, rates in found.items():
        row = [name]
        for kind in ("new", "held"):
            mine, theirs = statistics.median(rates[kind]), statistics.median(last[kind])
            row += [f"{mine:.1f} tokens/s", f"{mine / theirs:.2f}"]
        rows.append(row)
    return harness.markdown("server | prompts new | ratio | prompts held | ratio", rows)


def work(args: argparse.Namespace) -> Report:
    """Measure one table."""
    servers = dict(server.partition("=")[::2] for server in args.servers)
    if not all(url.startswith("http://") for url in servers.values()):
        raise UsageError(
            "servers: expected NAME=URL, such as ours=http://127.0.0.1:8080/v1 (http alone)"
        )
    harness.require(args, 1, *COUNTS)
    found = measure(servers, args)
    machine, asked = harness.machine(), {name: getattr(args, name) for name in COUNTS}
    facts = (
        f"{args.clients} clients, prompts of {args.words} words, {args.tokens} tokens each, "
        f"{args.turns} turns, {machine}"
    )
    data = {**harness.origin(), "facts": machine, **asked, "tokens_per_second": found}
    return Report(facts, table(found), data)


COUNTS = ("clients", "words", "tokens", "turns")
FLAGS = {
    "servers": dict(nargs="+", metavar="NAME=URL", help="such as .../v1"),
    "--clients": flag(4, "that ask at once"),
    "--words": flag(400, "of each prompt"),
    "--tokens": flag(64, "written by each"),
    "--turns": flag(5, "timed, of each server"),
}
main = harness.program("clients", __doc__, FLAGS, work)

if __name__ == "__main__":
    sys.exit(main())
