"""One client that wants an answer among many that want the server to stop: connections that send
nothing, clients that leave what they asked for, and streams that nobody reads, all at once.

python -m tests.programs.server_flood --idle 2000 --leavers 100 --unread 20 --seconds 60

First the client asks alone, then among them. Each of its requests must be answered, its slowest
first token must come within 2 s of the slowest one alone, and the server's resident memory must
stay within what docs/SERVER.md says that clients may take, beside its sessions' rows. When
all have gone nothing may run. Exit code 0, or 1 with a line for each fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import select
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import torch

from engine.serve.guards import BODIES
from engine.serve.http.listening import places
from tests.programs.server_kills import start
from tests.programs.server_load import gauges, resident

WITHIN = 2.0  # seconds by which a first token may be later than alone
SLOTS = 24  # every stream that nobody reads holds one until it pauses for too long
FLAGS = f"--port 0 --slots {SLOTS} --queue 256 --ctx 8K --threads 1 --grace 1".split()
CONNECTION = 40_000  # bytes of memory that a connection may take
STREAM = 2_500_000  # and a stream that nobody reads
TEXT = 600 * (2 * 8192 + (64 << 10))  # a long text that is being read: 600 a token
LONG = 1_000_000  # bytes of a leaver's text
ASKED = "The pass key of Alice is 48213. The sky is blue. {}\n\nWhat is the pass key of Alice?"


@dataclass
class Flood:
    """A run against a server on a port. counts: what was done; wrong: what should not have been."""

    port: int
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def open(self) -> socket.socket:
        """A connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def send(self, link: socket.socket, path: str, body: object) -> None:
        """A request, whole."""
        content = json.dumps(body).encode()
        link.sendall(
            b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % (path.encode(), len(content)) + content
        )


def ended(links: list[socket.socket]) -> list[socket.socket]:
    """Those that the server has closed."""
    poll = select.poll()
    known = {link.fileno(): link for link in links}
    for number in known:
        poll.register(number, select.POLLIN | select.POLLRDHUP)
    gone = select.POLLRDHUP | select.POLLHUP | select.POLLERR
    return [known[number] for number, what in poll.poll(0) if what & gone]


def idle(flood: Flood, many: int) -> None:
    """Keep many connections that send nothing, or half a header."""
    links: list[socket.socket] = []
    while not flood.over.is_set():
        for link in ended(links):
            links.remove(link)
            link.close()
            flood.counts["idle connections ended"] += 1
        for _ in range(min(many - len(links), many if not links else 200)):
            with contextlib.suppress(OSError):
                links.append(flood.open())
                flood.counts["idle connections"] += 1
                if len(links) % 3 == 0:
                    links[-1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: local")
        flood.over.wait(1.0)
    for link in links:
        link.close()


def leave(flood: Flood, many: int) -> None:
    """Again and again many clients at once that go before they have an answer."""
    chat = {"messages": [{"role": "user", "content": "Write on. " * 200}], "max_tokens": 4000}
    while not flood.over.is_set():
        links = []
        for number in range(many):
            with contextlib.suppress(OSError):
                links.append(link := flood.open())
                if number % 4 == 0:
                    flood.send(link, "/v1/tokenize", {"text": "x " * (LONG // 2)})
                elif number % 4 == 1:
                    link.sendall(
                        b"POST /v1/tokenize HTTP/1.1\r\nHost: localhost\r\n"
                        b"Content-Type: application/json\r\nContent-Length: 900000\r\n\r\n"
                        + b" "
                        * 400_000
                    )
                else:
                    flood.send(link, "/v1/chat/completions", chat | {"stream": number % 2 == 0})
                flood.counts["left"] += 1
        for link in links:
            link.close()
        flood.over.wait(5.0)


def unread(flood: Flood, many: int) -> None:
    """Keep many streams of long answers that nobody reads."""
    body = {
        "messages": [{"role": "user", "content": "hello"}], "stream": True, "ignore_eos": True,
        "max_tokens": 8000, "logprobs": True, "top_logprobs": 20,
    }  # fmt: skip
    links: list[socket.socket] = []
    while not flood.over.is_set():
        for link in ended(links):
            links.remove(link)
            link.close()
            flood.counts["unread streams ended"] += 1
        while len(links) < many and not flood.over.is_set():
            with contextlib.suppress(OSError):
                link = socket.socket()
                link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                link.connect(("127.0.0.1", flood.port))
                links.append(link)
                flood.send(link, "/v1/chat/completions", body)
                flood.counts["unread streams"] += 1
        flood.over.wait(0.5)
    for link in links:
        link.close()


def first_token(flood: Flood, number: int) -> float | None:
    """Seconds from a new connection to the first word of an answer; None where there was none."""
    content = ASKED.format(f"There are {number} doors.")
    body = {
        "messages": [{"role": "user", "content": content}], "max_tokens": 8, "stream": True,
        "temperature": 0,
    }  # fmt: skip
    began, found = time.monotonic(), None
    url = f"http://127.0.0.1:{flood.port}/v1/chat/completions"
    try:
        with httpx.stream("POST", url, json=body, timeout=60) as reply:
            if reply.status_code != 200:
                flood.wrong.append(f"status {reply.status_code}: {reply.read()[:200]!r}")
                return None
            for line in reply.iter_lines():
                if found is None and '"content": "' in line and '"content": ""' not in line:
                    found = time.monotonic() - began
    except httpx.HTTPError as error:
        flood.wrong.append(f"{type(error).__name__}: {error}")
        return None
    if found is None:
        flood.wrong.append("an answer without a word")
    return found


def times(flood: Flood, seconds: float, most: int = 10_000) -> list[float]:
    """First tokens of one client, one request after the other."""
    end, found = time.monotonic() + seconds, list[float]()
    while time.monotonic() < end and len(found) < most:
        taken = first_token(flood, len(found))
        if taken is not None:
            found.append(taken)
        time.sleep(0.1)
    return found


def settled(flood: Flood) -> None:
    """All have gone: nothing runs, waits or is paused."""
    end, url = time.monotonic() + 60, f"http://127.0.0.1:{flood.port}/v1"
    while True:
        now = gauges(url)
        if now["omnikv_requests_running"] == now["omnikv_requests_waiting"] == 0:
            return
        if time.monotonic() > end:
            flood.wrong.append(f"something runs or waits a minute after all have gone: {now}")
            return
        time.sleep(0.2)


def allowed(idle: int, unread: int, leavers: int) -> int:
    """Bytes that these clients may take, as docs/SERVER.md says: connections, streams, bodies that
    are not whole, a long text that is read, and those that wait for it.
    """
    waiting = min(leavers, SLOTS + 256) * 2 * LONG
    connections = min(idle + unread + leavers, 1000)
    return connections * CONNECTION + unread * STREAM + BODIES + TEXT + waiting


def run(
    folder: Path, counts: tuple[int, int, int], seconds: float, within: float | None, say=print
) -> Flood:
    """Start a server, ask alone and in the flood (idle, leavers, unread), look at what is left."""
    places(3 * sum(counts))  # descriptors of this process
    process, url = start(None, folder / "log", FLAGS)
    flood = Flood(int(url.removesuffix("/v1").rpartition(":")[2]))
    try:
        times(flood, 60, 2)  # the first ones fill caches
        alone = times(flood, 60, 20)
        base, most = resident(process.pid), 0
        say(f"alone: {summary(alone)}; resident {base / 1e6:.0f} MB")
        kinds = zip((idle, leave, unread), counts, strict=True)
        others = [threading.Thread(target=kind, args=(flood, many)) for kind, many in kinds]
        for thread in others:
            thread.start()
        end, among = time.monotonic() + seconds, list[float]()
        while time.monotonic() < end and process.poll() is None:
            among += times(flood, 60, 4)
            most = max(most, resident(process.pid))
        now = gauges(url)
        say(f"among them: {summary(among)}; {dict(flood.counts)}")
        flood.over.set()
        for thread in others:
            thread.join()
        settled(flood)
        banks = now["omnikv_bank_device_bytes"] + now["omnikv_bank_host_bytes"]
        rows = int(banks * now["omnikv_tokens_held"] / now["omnikv_slots_held"] / 8192)
        bound = allowed(*counts[::2], counts[1]) + rows
        say(
            f"resident at most {most / 1e6:.0f} MB: {(most - base) / 1e6:.0f} MB more, of "
            f"{bound / 1e6:.0f} MB that the clients ({(bound - rows) / 1e6:.0f}) and the rows of "
            f"all sessions ({rows / 1e6:.0f}) may take; {resident(process.pid) / 1e6:.0f} MB "
            f"when all had gone; paused at the end {now['omnikv_requests_paused']:.0f}"
        )
        if most - base > bound:
            flood.wrong.append(f"memory grew by {most - base} bytes, of {bound} allowed")
        if not among or not alone:
            flood.wrong.append("no answer came")
        elif within is not None and max(among) > max(alone) + within:
            flood.wrong.append(f"a first token took {max(among):.2f} s, alone {max(alone):.2f} s")
        said = (folder / "log").read_text(errors="replace")
        if len(said) > 10_000:
            flood.wrong.append(f"the log has {len(said)} characters: {said[-300:]}")
        if process.poll() is not None:
            flood.wrong.append(f"the server ended: {said[-500:]}")
        return flood
    finally:
        flood.over.set()
        process.kill()
        process.wait()


def summary(found: list[float]) -> str:
    """Figures of first tokens."""
    if not found:
        return "no first token"
    return (
        f"{len(found)} first tokens, median {1e3 * median(found):.0f} ms, slowest "
        f"{1e3 * max(found):.0f} ms"
    )


def main() -> int:
    """Run the command line; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--idle", type=int, default=2000)
    parser.add_argument("--leavers", type=int, default=100)
    parser.add_argument("--unread", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    capability = torch.backends.cpu.get_cpu_capability()
    load = " ".join(f"{part:.1f}" for part in os.getloadavg())
    print(f"{platform.machine()} {capability}, {os.cpu_count()} cores, load before {load}")
    counts = (args.idle, args.leavers, args.unread)
    print(
        f"{counts[0]} idle connections, {counts[1]} leavers every 5 s, {counts[2]} unread streams"
    )
    with tempfile.TemporaryDirectory() as folder:
        flood = run(Path(folder), counts, args.seconds, WITHIN)
    for line in flood.wrong[:20]:
        print(f"wrong: {line}")
    print(f"load after {os.getloadavg()[0]:.1f}; {len(flood.wrong)} faults")
    return 1 if flood.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
