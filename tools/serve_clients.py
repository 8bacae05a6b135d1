"""`python -m tools.serve_clients NAME=URL NAME=URL`: servers of OpenAI's interface, in turns under
the same clients.

In a turn all clients ask one server at once for the continuation of a text of their own, each of
`--tokens` tokens. The table has tokens per second of all clients together, medians: with prompts
that the server has not seen, and with those of the turn before, which it may hold.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from engine.errors import EngineError, UsageError
from kernels.isa import isa
from tools.bench.header import commit, hardware
from tools.program import guarded, progress, replace_json, require_writable, say

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


def measure(
    servers: dict[str, str], clients: int, words: int, tokens: int, turns: int
) -> dict[str, dict[str, list[float]]]:
    """{server: {"new" and "held": tokens per second of each turn}}, after a first."""
    found: dict[str, dict[str, list[float]]] = {n: {"new": [], "held": []} for n in servers}
    first = time.time_ns()  # a server may hold the texts of an earlier run
    for number in range(turns + 1):
        texts = [text_of(words, first + number * clients + i) for i in range(clients)]
        for kind in ("new", "held"):
            for name, url in servers.items():
                progress(f"turn {number} of {turns}, {kind}, {name}")
                rate = turn(url, texts, tokens)
                if number:
                    found[name][kind].append(rate)
    say("")
    return found


def table(found: dict[str, dict[str, list[float]]]) -> str:
    """A Markdown table; ratios to the last server."""
    lines = ["| server | prompts new | ratio | prompts held | ratio |", "|---|---|---|---|---|"]
    last = list(found.values())[-1]
    for name, rates in found.items():
        cells = []
        for kind in ("new", "held"):
            mine, theirs = statistics.median(rates[kind]), statistics.median(last[kind])
            cells += [f"{mine:.1f} tokens/s", f"{mine / theirs:.2f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> None:
    """Measure and print one table."""
    if args.json:
        require_writable("--json", args.json)
    servers = dict(server.partition("=")[::2] for server in args.servers)
    if not all(url.startswith("http://") for url in servers.values()):
        raise UsageError(
            "servers: expected NAME=URL, such as ours=http://127.0.0.1:8080/v1 (http alone)"
        )
    if min(args.clients, args.words, args.tokens, args.turns) < 1:
        raise UsageError("--clients, --words, --tokens, --turns: expected 1 or more")
    found = measure(servers, args.clients, args.words, args.tokens, args.turns)
    facts = f"{isa()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    print(
        f"{args.clients} clients, prompts of {args.words} words, {args.tokens} tokens each, "
        f"{args.turns} turns, {facts}\n"
    )
    print(table(found))
    if args.json:
        asked = {k: getattr(args, k) for k in ("clients", "words", "tokens", "turns")}
        report = {"commit": commit(), "hardware": hardware("cpu"), "facts": facts, **asked}
        replace_json(args.json, {**report, "tokens_per_second": found})


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, 1 (a server that refuses) or 2 (usage)."""
    parser = argparse.ArgumentParser(prog="python -m tools.serve_clients", description=__doc__)
    parser.add_argument("servers", nargs="+", metavar="NAME=URL", help="such as .../v1")
    parser.add_argument("--clients", type=int, default=4, metavar="N")
    parser.add_argument("--words", type=int, default=400, metavar="N", help="of each prompt")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="written by each")
    parser.add_argument("--turns", type=int, default=5, metavar="N", help="timed, of each server")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    return guarded(lambda: run(args))


if __name__ == "__main__":
    sys.exit(main())
