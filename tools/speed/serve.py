"""What the server costs over the library, at one client.

A server (`python -m engine.serve`, a process of its own) and the library in this process take turns
at the same answer to the same prompt, which both hold already: one stream of `--tokens` tokens. The
table has seconds of the clock and of CPU time per token (all threads of the server's process), and
the clock until the first token.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from engine import LLM, SamplingParams
from engine.base.errors import EngineError, UsageError
from tools.common.program import POCKET
from tools.speed import harness
from tools.speed.harness import Report, flag

STARTING = 120.0  # seconds that a server may take to load


class Answer(NamedTuple):
    """Seconds of one answer: until its first token, from there to its end, CPU time of all."""

    first: float
    rest: float
    cpu: float


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process on Linux: its clock's number follows from its id."""
    return time.clock_gettime((~pid << 3) | 2)


@contextmanager
def serving(model: str, context: int, threads: int) -> Iterator[tuple[int, int]]:
    """(process id, port) of a server of this model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = f"--port {port} --ctx {context} --threads {threads} --alias m --model".split()
    process = subprocess.Popen([sys.executable, "-m", "engine.serve", *flags, model])
    try:
        end = time.monotonic() + STARTING
        while not _ready(port):
            if process.poll() is not None or time.monotonic() > end:
                raise EngineError("the server did not start; its own line says why")
            time.sleep(0.1)
        yield process.pid, port
    finally:
        process.terminate()
        process.wait()


def _ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def asked(port: int, pid: int, ids: Sequence[int], tokens: int) -> Answer:
    """The server's answer to a prompt, as a stream. Raises EngineError where it is of other than
    `tokens` tokens.
    """
    body = {
        "prompt": list(ids),
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.connect()
    used, began = cpu_seconds(pid), time.perf_counter()
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    reply = connection.getresponse()
    first, usage = 0.0, {}
    while line := reply.readline():
        if line.startswith(b"data: {"):
            first = first or time.perf_counter()
            if b'"usage"' in line:
                usage = json.loads(line[6:])["usage"]
    ended = time.perf_counter()
    connection.close()
    if not usage:
        raise EngineError(f"the server answered with status {reply.status}")
    if usage["completion_tokens"] != tokens:
        raise EngineError(
            f"the server wrote {usage['completion_tokens']} tokens, expected {tokens}"
        )
    return Answer(first - began, ended - first, cpu_seconds(pid) - used)


def alone(llm: LLM, ids: Sequence[int]) -> Callable[[int], Answer]:
    """What answers to `ids` in a session that holds them."""
    session = llm.session()
    session.prefill(ids)

    def answer(tokens: int) -> Answer:
        used, began, first = time.process_time(), time.perf_counter(), 0.0
        session.truncate(len(ids))
        for _ in session.generate([], SamplingParams(max_tokens=tokens, ignore_eos=True)):
            first = first or time.perf_counter()
        ended = time.perf_counter()
        return Answer(first - began, ended - first, time.process_time() - used)

    return answer


def measure(model: str, prompt: int, tokens: int, turns: int, threads: int) -> dict[str, Any]:
    """Medians of both ways, in turns after a first that is not counted."""
    context = prompt + tokens + 64
    llm = LLM(model, max_context=context, threads=threads)
    if llm.tokenizer is None:
        raise UsageError("--model: found no tokenizer, which a server needs")
    text = "The old lighthouse stood at the end of the road. "
    ids = llm.encode(text * (prompt // 4))[:prompt]
    library = alone(llm, ids)
    with serving(model, context, threads) as (pid, port):
        ways = {
            "library": lambda turn: library(tokens),
            "server": lambda turn: asked(port, pid, ids, tokens),
        }
        found = harness.in_turns(ways, turns)
    row: dict[str, Any] = {"model": Path(model).name, "dtype": str(llm.dtype).split(".")[1]}
    row |= {"prompt": prompt, "tokens": tokens, "turns": turns, "threads": threads}
    for name, answers in found.items():
        row[name] = {
            "seconds_per_token": statistics.median(a.rest for a in answers) / (tokens - 1),
            "cpu_per_token": statistics.median(a.cpu for a in answers) / tokens,
            "first": statistics.median(a.first for a in answers),
        }
    for what in ("seconds_per_token", "cpu_per_token"):
        row[f"{what}_overhead"] = row["server"][what] / row["library"][what] - 1
    row["first_later"] = row["server"]["first"] - row["library"]["first"]
    return row


def table(row: dict[str, Any]) -> str:
    """A Markdown table of both ways."""
    cells = []
    for name in ("library", "server"):
        mine = [row[name][what] * 1e3 for what in ("seconds_per_token", "cpu_per_token", "first")]
        cells.append((name, *(f"{value:.2f} ms" for value in mine)))
    part = [f"{row[f'{what}_overhead']:+.1%}" for what in ("seconds_per_token", "cpu_per_token")]
    cells.append(("the server's part", *part, f"{row['first_later'] * 1e3:+.2f} ms"))
    return harness.markdown("way | clock per token | CPU per token | first token", cells)


def work(args: argparse.Namespace) -> Report:
    """Measure one table."""
    if not sys.platform.startswith("linux"):
        raise UsageError("this reads another process's CPU time, which needs Linux")
    harness.require(args, 2, "tokens")
    harness.require(args, 1, "turns", "threads")
    harness.require(args, 16, "prompt")
    row = measure(args.model, args.prompt, args.tokens, args.turns, args.threads)
    machine = harness.machine()
    facts = (
        f"{row['model']}, {row['dtype']}, {args.prompt} tokens held, {args.tokens} written, "
        f"{args.threads} thread(s), {args.turns} turns, {machine}"
    )
    return Report(facts, table(row), harness.origin() | {"facts": machine} | row)


FLAGS = {
    "--model": dict(default=str(POCKET), metavar="NAME"),
    "--prompt": flag(512, "tokens held"),
    "--tokens": flag(128, "tokens written"),
    "--turns": flag(9, "timed, of each way"),
    "--threads": flag(1, "of the server, and of the library"),
}
main = harness.program("serve", __doc__, FLAGS, work)

if __name__ == "__main__":
    sys.exit(main())
